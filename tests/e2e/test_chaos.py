"""The example functions under mixed load, while processes of functions and models are killed.

`GPUFAAS_E2E_SECONDS=60` has it go on for a minute.
"""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from gateway_ext.runtime.template.example_calls import examples_in
from tests.kit.places import ROOT
from tests.kit.stacks.load import Asked, Failure, Load, counted, load, warm
from tests.kit.stacks.stack import Rest, Stack, kill
from tests.kit.waiting import wait_until

CALLERS = 2  # of each function
EVERY_S = 1.5
PAUSE_S = 0.05  # without it, the plain function takes the processors
NAMES = ("classify", "generate", "pipeline", "hello")
ONCE = ("generate", "hello")  # the others say that they may be asked again
_BROKEN_OFF, _FAILED, _UNREACHABLE = 0, 500, 502
_SURVIVED = 1  # a call is repeated when a model's process dies under it, so many times


class Killed(NamedTuple):
    """A function's process that was killed; large ones take a moment, and seem to listen in it.

    One that has a model, or may get one, is nobody's function.
    """

    function: str
    at_s: float
    gone_s: float
    served: int

    def was_under(self, failure: Failure) -> bool:
        """Whether a call was under way when it ended."""
        return failure.began_s <= self.gone_s and self.at_s <= failure.ended_s


@pytest.fixture(scope="module")
def examples(up: Stack) -> Iterator[list[Asked]]:
    """The functions of stack.yml, each on a GPU that wants one."""
    rest = Rest(up)
    said: dict[str, Any] = yaml.safe_load((ROOT / "stack.yml").read_text())["functions"]
    assert set(said) == set(NAMES)
    for name, one in said.items():
        fields = {"annotations": one["annotations"], "labels": one.get("labels", {})}
        process = {"envProcess": "python runtime --gpu", "image": one["image"]}
        rest.deploy(name, envVars=one.get("environment", {}), **process, **fields)
    asked = [Asked(name, examples_in(ROOT / "functions" / name)[0].body, PAUSE_S) for name in said]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda one: warm(up, rest, one), (a for a in asked if a.name != "hello")))
    yield asked
    for name in said:
        rest.remove(name)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_only_calls_on_a_killed_process_fail_when_functions_and_models_die(
    examples: list[Asked], up: Stack, chaos_s: float
) -> None:
    killed: list[Killed] = []
    models: list[Killed] = []
    with load(up.url, examples, each=CALLERS) as found:
        found.some_more(10)
        end_s = time.monotonic() + chaos_s
        # Of every third round, the models' processes.
        for number in itertools.cycle(range(3)):
            if time.monotonic() > end_s:
                break
            if number == 2:
                models += _kill_model(up)
            else:
                killed += _kill_one(up, found, killed)
            time.sleep(EVERY_S)
        found.some_more(5)
    _judge(found, killed, models, up)
    wait_until(lambda: len(up.workers()) > 0, "models have processes")


def _kill_one(up: Stack, found: Load, killed: list[Killed]) -> list[Killed]:
    """One that has served since it was last killed: a call need not survive any number of them."""
    last = {one.function: one.served for one in killed}
    serving = [name for name in NAMES if found.succeeded[name] > last.get(name, 0)]
    name = random.choice(serving) if serving else ""
    served, processes = found.succeeded[name], up.instances(name)
    if not processes:
        return []  # all are on their way back
    at_s, pid = time.monotonic(), processes[0]
    kill(pid)
    # Its parent has buried it: until all its threads have ended, its socket may be open.
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "it is gone")
    # Calls that it had answered may still have been counted after it was killed.
    return [Killed(name, at_s, time.monotonic(), served + CALLERS)]


def _kill_model(up: Stack) -> list[Killed]:
    """Any process that has a model, or may get one."""
    workers = up.workers()
    if not workers:
        return []  # all are on their way back
    at_s, pid = time.monotonic(), random.choice(workers)
    kill(pid)
    wait_until(lambda: pid not in up.workers(), "it is gone")
    return [Killed("", at_s, time.monotonic(), 0)]


def _judge(found: Load, killed: list[Killed], models: Sequence[Killed], up: Stack) -> None:
    """Every failure has a process that was killed under it, and nothing else is excused."""
    unexcused = [
        failure
        for failure in found.failures
        if not _excused(failure, killed) and not _lost_models(failure, models)
    ]
    told = f"{counted(unexcused)} of {found.succeeded}; {unexcused}; "
    told += f"killed: {killed}, models: {models}"
    assert not unexcused, f"{told}\n{up.said()}"
    assert killed
    assert min(found.succeeded.values()) >= 15


def _lost_models(failure: Failure, models: Sequence[Killed]) -> bool:
    """Whether more processes of models were killed under a call than it survives."""
    under = [one for one in models if one.was_under(failure)]
    return len(under) > _SURVIVED and failure.status in (_BROKEN_OFF, _FAILED)


def _excused(failure: Failure, killed: list[Killed]) -> bool:
    """Whether a process was killed under it; a stream that had begun can only break off."""
    under = [one for one in killed if one.function == failure.name and one.was_under(failure)]
    known = failure.status == _UNREACHABLE or (
        failure.status == _BROKEN_OFF and failure.name == "generate"
    )
    return bool(under) and known and failure.name in ONCE
