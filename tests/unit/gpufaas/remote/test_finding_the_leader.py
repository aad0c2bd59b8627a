"""How commands find the scheduler that leads, and what they give to one alone."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from gpufaas.cli import EXIT_BAD_USE, main
from gpufaas.errors import CommandError
from gpufaas.options.shared import cluster_secret
from gpufaas.remote.http_request import NoAnswer
from gpufaas.remote.scheduler_api import SchedulerApi
from tests.kit.network.answering import answering


def test_command_follows_a_standby_to_the_leader() -> None:
    with (
        answering(200, {"policy": "lb"}) as (leader, asked),
        answering(421, {"error": "not-leading", "leader": leader}) as (standby, _),
    ):
        assert SchedulerApi((standby,), "t0ken").get("/policy", most=3, gpu=None) == {
            "policy": "lb"
        }
        assert asked == ["/policy?most=3 Bearer t0ken"]


def test_command_asks_the_next_scheduler_when_one_does_not_answer() -> None:
    with answering(200, {}) as (alive, asked):
        assert SchedulerApi(("http://127.0.0.1:9", alive), "t0ken").get("/policy") == {}
        assert len(asked) == 1


def test_order_is_given_once_when_its_scheduler_may_have_received_it() -> None:
    with breaking_off() as frozen, answering(200, {}) as (alive, asked):
        api = SchedulerApi((frozen, alive), "t0ken")
        with pytest.raises(CommandError, match="it may be carried out"):
            api.post("/models/m/evict", once=True)
        with pytest.raises(CommandError, match="it may be carried out"):
            api.delete("/quotas/team")
        assert asked == []
        api.post("/models/m/pin")
        assert len(asked) == 1
        assert SchedulerApi(("http://127.0.0.1:9", alive), "t0ken").delete("/quotas/team") == {}


@contextmanager
def breaking_off() -> Iterator[str]:
    """A server that takes requests and closes without an answer."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                taken = listener.accept()[0]
                taken.recv(1 << 16)
                taken.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "place", ["policy {} get", "policy get {}", "policy --json --scheduler http://x get {}"]
)
def test_options_of_a_verb_may_stand_before_it_and_the_later_one_wins(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPUFAAS_SCHEDULER", raising=False)
    cluster_secret(str(tmp_path / "secret"), {}, make=True)
    with answering(200, {"policy": "lb", "parameters": {}}) as (url, asked):
        options = f"--scheduler {url} --secret-file {tmp_path / 'secret'} --json"
        assert main(place.format(options).split()) == 0
        assert len(asked) == 1
    assert json.loads(capsys.readouterr().out) == {"policy": "lb", "parameters": {}}


def test_command_gives_up_when_a_scheduler_names_itself() -> None:
    answer: dict[str, Any] = {"error": "not-leading"}
    with answering(421, answer) as (standby, asked):
        answer["leader"] = standby
        with pytest.raises(NoAnswer, match="every scheduler names another one"):
            SchedulerApi((standby,), "t0ken").get("/policy")
        assert len(asked) > 1


def test_command_reports_in_one_line_that_no_server_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster_secret(str(tmp_path / "s"), {}, make=True)
    words = ["status", "--scheduler", "http://127.0.0.1:9", "--secret-file", str(tmp_path / "s")]
    assert main(words) == EXIT_BAD_USE
    error = capsys.readouterr().err
    assert error.startswith("gpufaas status: no scheduler answers at http://127.0.0.1:9: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["status", "--scheduler", "127.0.0.1:9"],
        ["policy", "set", "lb", "o3_limit"],
        ["prefetch", "bert"],
    ],
)
def test_bad_use_of_a_scheduler_command_is_reported_in_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GPUFAAS_SCHEDULER", raising=False)
    assert main(words) == EXIT_BAD_USE
    assert capsys.readouterr().err.startswith(f"gpufaas {words[0]}: ")
