"""The examples begin again when the gateway breaks a request off."""

from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from gpufaas.errors import CommandError
from gpufaas.stack import example_functions
from gpufaas.stack.example_functions import show_examples

PLAN: Any = SimpleNamespace(folder=SimpleNamespace(log="logs of the {}".format))


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

    monkeypatch.setattr(example_functions, "_show_once", show_once)
    assert await show_examples(PLAN)
    assert capsys.readouterr().out.count("the gateway broke a request off") == 2


async def test_examples_end_in_words_when_the_gateway_always_breaks_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def show_once(_plan: object) -> bool:
        raise aiohttp.ServerDisconnectedError

    monkeypatch.setattr(example_functions, "_show_once", show_once)
    with pytest.raises(CommandError, match="broke off 3 requests; see logs of the gateway"):
        await show_examples(PLAN)
