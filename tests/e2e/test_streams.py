"""Functions whose deployments wish for streams, through a whole stack: one process for them all."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from gpufaas.stack_folder import StackFolder
from tests.kit.stacks import handlers
from tests.kit.stacks.load import Asked, warm
from tests.kit.stacks.stack import Rest, Stack, kill, stack
from tests.kit.waiting import wait_until

_WISHES = {"first": "stream", "second": "stream", "third": "stream", "alone": "process"}
_GPU = {"com.gpufaas.enabled": "true"}


class Streams(NamedTuple):
    """A stack with functions that share a process, and one that does not."""

    up: Stack
    rest: Rest

    def rows(self) -> list[dict[str, Any]]:
        """The models on the node's GPUs, as its GPU manager lists them."""
        address = StackFolder(self.up.state).node_address
        done = self.up.run("models", "--address", address, "--json")
        assert not done.returncode, done.stderr
        rows: list[dict[str, Any]] = json.loads(done.stdout)
        return [row for row in rows if row["gpu"] is not None]

    def answers(self) -> dict[str, object]:
        found = {name: self.rest.call(name) for name in _WISHES}
        wrong = {name: answer.text for name, answer in found.items() if answer.is_error}
        logs = self.rest.ask("GET", "/system/logs?name=first&tail=60&follow=false").text
        assert not wrong, f"{wrong}\n{logs}"
        return {name: answer.json() for name, answer in found.items()}


@pytest.fixture(scope="module")
def streams(environment: Mapping[str, str]) -> Iterator[Streams]:
    with stack(environment) as up:
        up.start("--devices", "cpu:1", "--emulate-context", "0.05:64MiB")
        rest = Rest(up)
        for number, (name, runtime) in enumerate(_WISHES.items()):
            text = handlers.ON_GPU.replace("manual_seed(0)", f"manual_seed({number})")
            text = text.replace('"pid": os.getpid()', '"sum": round(float(answer().sum()), 4)')
            written = dict(handlers.write(up.work, name, text))
            wishes = {"com.gpufaas.runtime": runtime}
            rest.deploy(name, annotations=written | _GPU | wishes)
        for name in _WISHES:
            warm(up, rest, Asked(name))
        yield Streams(up, rest)


def test_models_share_a_process_as_their_deployments_wish(streams: Streams) -> None:
    first = streams.answers()
    assert len({str(answer) for answer in first.values()}) == len(_WISHES)
    runtimes = {row["label"]: row["runtime"] for row in streams.rows()}
    assert runtimes == _WISHES
    assert streams.answers() == first


def test_calls_go_on_when_the_shared_process_is_killed(streams: Streams) -> None:
    expected = streams.answers()
    for worker in streams.up.workers():
        kill(worker)
    assert streams.answers() == expected
    wait_until(lambda: len(streams.rows()) == len(_WISHES), "all are loaded again")
    assert {row["label"]: row["runtime"] for row in streams.rows()} == _WISHES
