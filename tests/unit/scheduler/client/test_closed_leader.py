"""A caller that dials a leader whose term ends before the caller has presented itself."""

import pytest

from common.frames.stream_upgrade import dial
from scheduler.service.http.access import ApiRole, token
from scheduler.wire.caller_stream import (
    MAX_FRAME_BYTES,
    PATH,
    VERSION,
    Present,
    SentAway,
    pack_up,
    read_down,
)
from tests.kit.worlds.service_world import SECRET, leading


@pytest.mark.timeout(30, func_only=True)
async def test_caller_is_sent_away_when_the_term_ended_before_its_first_frame() -> None:
    async with leading() as world:
        callers = world.service.callers
        assert callers is not None
        headers = {"Authorization": f"Bearer {token(SECRET, ApiRole.CALLER)}"}
        async with await dial(world.url, PATH, headers, MAX_FRAME_BYTES) as line:
            await callers.close()
            line.send(pack_up(Present(VERSION, "late", ())))
            assert isinstance(read_down(await line.receive()), SentAway)
            assert not callers.lines
