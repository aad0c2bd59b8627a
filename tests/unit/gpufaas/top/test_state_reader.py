"""The state that `gpufaas top` shows while its gateway answers badly, or not at all."""

from typing import Any

import pytest

from gpufaas.commands.top import StateReader
from gpufaas.errors import CommandError
from gpufaas.remote.gateway_api import GatewayApi
from gpufaas.remote.http_request import http_url
from tests.kit.waiting import wait_until

STATE: Any = {"scheduler": {"ok": True}, "queue": 1}
NEXT: Any = {**STATE, "queue": 2}
NO_STATE = "http://gateway answers what is no state of a page"


class FakeGateway(GatewayApi):
    """Gives these answers, and the last one again and again."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(http_url("http://gateway", "gateway"), "")
        self.answers = list(answers)

    def get(self, path: str) -> Any:
        assert path == "/ui/state"
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        (CommandError("no gateway answers"), "no gateway answers"),
        ([5], NO_STATE),
        ({"status": "ok"}, NO_STATE),  # of another server
    ],
)
def test_state_stays_with_the_trouble_until_there_is_another(answer: Any, trouble: str) -> None:
    seen: list[tuple[Any, str]] = []
    reader = StateReader(
        FakeGateway(STATE, answer, NEXT),
        lambda: seen.append(reader.latest()),
        every_s=0.01,
    )
    assert reader.latest() == (None, "")
    reader.start()
    try:
        wait_until(lambda: len(seen) > 2, "three answers")
    finally:
        reader.stop()
    assert seen[:3] == [(STATE, ""), (STATE, trouble), (NEXT, "")]
