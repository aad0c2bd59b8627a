"""The examples begin again when the gateway breaks a request off."""

from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from gpufaas.errors import CommandError
from gpufaas.stack import examples
from gpufaas.stack.examples import show_examples


def plan(*readiness: bool, start_s: float = 60.0) -> Any:
    """One whose gateway is ready, or not, at each look."""
    looks = list(readiness)

    async def ready() -> bool:
        return looks.pop(0)

    gateway = SimpleNamespace(ready=ready, start_s=start_s, log="gateway.log")
    return SimpleNamespace(gateway=lambda: gateway)


@pytest.mark.parametrize(
    "broken", [aiohttp.ClientOSError(104, "Connection reset by peer"), TimeoutError()]
)
async def test_examples_begin_again_after_a_request_was_broken_off(
    broken: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [broken, broken, None]

    async def show_once(_plan: object) -> bool:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome
        return True

    monkeypatch.setattr(examples, "_show_once", show_once)
    monkeypatch.setattr(examples, "_PAUSE_S", 0.0)
    assert await show_examples(plan(False, True, True))
    assert capsys.readouterr().out.count("the gateway broke a request off") == 2


async def break_off(_plan: object) -> bool:
    raise aiohttp.ServerDisconnectedError


async def test_examples_end_in_words_when_the_gateway_always_breaks_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(examples, "_show_once", break_off)
    with pytest.raises(CommandError, match=r"broke off 3 requests; see gateway\.log"):
        await show_examples(plan(True, True, True))


async def test_examples_end_in_words_when_the_gateway_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(examples, "_show_once", break_off)
    with pytest.raises(CommandError, match="not ready after 0 s"):
        await show_examples(plan(False, start_s=0.0))
