"""Lines of frames over a transport that carries nothing: what arrives, what leaves, and the end."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.frame_line import FrameLine, LineBroken
from common.time_limits import time_limit
from tests.kit.network.memory_transport import MemoryTransport
from tests.kit.network.raw_line import framed
from tests.kit.virtual_time import virtually
from tests.kit.waiting import eventually

pytestmark = pytest.mark.timeout(180, func_only=True)

MOST = 1000


def a_line(*, half_closes: bool = True) -> tuple[FrameLine, MemoryTransport]:
    line, transport = FrameLine(MOST), MemoryTransport(half_closes=half_closes)
    line.connection_made(transport)
    return line, transport


async def broken(line: FrameLine) -> str:
    """Why nothing is received on this line any more."""
    with pytest.raises(LineBroken) as found:
        await line.receive()
    return str(found.value)


def nothing(frame: bytes) -> None:
    raise AssertionError(f"{frame!r} was taken")


# -- what arrives ---------------------------------------------------------------------------------


@given(
    frames=st.lists(st.binary(min_size=1, max_size=40), max_size=20),
    cuts=st.lists(st.integers(0, 900), max_size=20),
    early=st.integers(0, 20),
)
def test_frames_are_whole_however_their_bytes_are_cut_and_joined(
    frames: list[bytes], cuts: list[int], early: int
) -> None:
    """Some pieces come before anybody pumps, the others while somebody does."""

    @virtually
    async def pumped() -> None:
        line, _ = a_line()
        data, taken = framed(*frames), list[bytes]()
        ends = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
        pieces = [data[begin:end] for begin, end in pairwise(ends)]
        for piece in pieces[:early]:
            line.data_received(piece)
        pump = asyncio.ensure_future(line.pump(taken.append))
        await asyncio.sleep(0)
        for piece in pieces[early:]:
            line.data_received(piece)
        assert taken == frames
        line.connection_lost(None)
        with pytest.raises(LineBroken):
            await pump

    pumped()


async def test_frames_are_received_one_by_one_also_after_the_end() -> None:
    line, _ = a_line()
    line.data_received(framed(b"one", b"two"))
    line.eof_received()
    assert [await line.receive(), await line.receive()] == [b"one", b"two"]
    assert "has closed" in await broken(line)


async def test_line_breaks_at_a_frame_without_a_byte() -> None:
    line, transport = a_line()
    line.data_received(framed(b"one", b"", b"two"))
    assert await line.receive() == b"one"
    assert "without a byte" in await broken(line)
    assert transport.was_aborted()


async def test_large_frame_is_refused_by_its_announcement_until_the_bound_is_raised() -> None:
    line, transport = a_line()
    line.data_received(framed(bytes(MOST)))
    assert len(await line.receive()) == MOST
    line.max_frame_bytes = MOST + 1
    line.data_received(framed(bytes(MOST + 1)))
    assert len(await line.receive()) == MOST + 1
    line.data_received(framed(bytes(MOST + 2))[:4])
    assert f"{MOST + 2} bytes came, where {MOST + 1} are" in await broken(line)
    assert transport.was_aborted()


@pytest.mark.parametrize("arrived_bytes", [1, 4, 5, 6])
async def test_end_within_a_frame_is_told_from_an_end_between_two(arrived_bytes: int) -> None:
    line, _ = a_line()
    line.data_received(framed(b"one") + framed(b"two")[:arrived_bytes])
    line.eof_received()
    assert await line.receive() == b"one"
    assert "within a frame" in await broken(line)


async def test_lost_connection_is_told_by_its_error() -> None:
    line, _ = a_line()
    line.connection_lost(ConnectionResetError("it was reset"))
    assert "it was reset" in await broken(line)


@pytest.mark.parametrize("frame", [b"small", bytes(100_000)], ids=["many", "large"])
async def test_reading_pauses_while_much_is_unread_and_goes_on_later(frame: bytes) -> None:
    line, transport = a_line()
    line.max_frame_bytes = len(frame)
    sent = 0
    while transport.is_reading():
        line.data_received(framed(frame))
        sent += 1
        assert sent * len(frame) < 1 << 20
    await line.receive()
    assert not transport.is_reading()
    for _ in range(sent // 2):
        await line.receive()
    assert transport.is_reading()


async def test_reading_goes_on_when_a_pump_takes_what_was_unread() -> None:
    line, transport = a_line()
    line.data_received(framed(*[b"x"] * 100))
    assert not transport.is_reading()
    taken: list[bytes] = []
    pump = asyncio.ensure_future(line.pump(taken.append))
    await asyncio.sleep(0)
    assert (len(taken), transport.is_reading()) == (100, True)
    pump.cancel()


@pytest.mark.parametrize("begun", ["unread", "arriving"])
async def test_takers_exception_ends_the_pump_and_loses_no_later_frame(begun: str) -> None:
    line, _ = a_line()

    def take(frame: bytes) -> None:
        if frame == b"two":
            raise ValueError("not two")

    pump = asyncio.ensure_future(line.pump(take))
    if begun == "arriving":
        await asyncio.sleep(0)
    line.data_received(framed(b"one", b"two", b"three"))
    line.data_received(framed(b"four"))
    with pytest.raises(ValueError, match="not two"):
        await pump
    assert [await line.receive(), await line.receive()] == [b"three", b"four"]


async def test_no_frame_is_lost_when_whoever_receives_is_cancelled() -> None:
    line, _ = a_line()
    for wait in (line.receive(), line.pump(nothing)):
        receiving = asyncio.ensure_future(wait)
        await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.wait({receiving})
    line.data_received(framed(b"one"))
    assert await line.receive() == b"one"


@pytest.mark.parametrize("end", [FrameLine.hang_up, FrameLine.abort])
async def test_no_frame_is_taken_behind_the_one_at_which_the_taker_ended_the_line(
    end: object,
) -> None:
    line, _ = a_line()
    assert callable(end)
    taken: list[bytes] = []

    def take(frame: bytes) -> None:
        taken.append(frame)
        end(line)

    pump = asyncio.ensure_future(line.pump(take))
    await asyncio.sleep(0)
    line.data_received(framed(b"one", b"two") + framed(b"three")[:-1])
    line.data_received(b"e" + framed(b"four"))
    with pytest.raises(LineBroken, match="hung up"):
        await pump
    assert taken == [b"one"]


# -- what leaves ----------------------------------------------------------------------------------


async def test_frames_of_one_step_are_one_write() -> None:
    line, transport = a_line()
    line.send(b"one")
    line.send(b"two")
    assert transport.written == []
    await asyncio.sleep(0)
    line.send(b"three")
    await asyncio.sleep(0)
    assert transport.written == [framed(b"one", b"two"), framed(b"three")]


async def test_answers_leave_in_the_step_in_which_the_frames_came_behind_what_waited() -> None:
    line, transport = a_line()
    pump = asyncio.ensure_future(line.pump(line.send))
    await asyncio.sleep(0)
    line.data_received(framed(b"one", b"two"))
    assert transport.written == [framed(b"one", b"two")]
    line.send(b"three")
    line.data_received(framed(b"four"))
    assert transport.written[1:] == [framed(b"three", b"four")]
    await asyncio.sleep(0)
    assert len(transport.written) == 2
    pump.cancel()


async def test_unsent_bytes_are_those_of_the_line_and_of_its_transport() -> None:
    line, transport = a_line()
    assert line.unsent_bytes == 0
    line.send(b"one")
    transport.unwritten_bytes = 100
    assert line.unsent_bytes == 100 + len(framed(b"one"))
    await asyncio.sleep(0)
    assert line.unsent_bytes == 100
    assert FrameLine(MOST).unsent_bytes == 0


# -- the end --------------------------------------------------------------------------------------


async def test_hung_up_line_sends_what_it_had_receives_nothing_and_closes_in_time() -> None:
    line, transport = a_line()
    line.send(b"last")
    line.hang_up()
    line.hang_up()
    line.send(b"too late")
    line.data_received(framed(b"dropped"))
    assert transport.written == [framed(b"last")]
    assert transport.has_ended()
    assert not transport.is_closing()
    assert "hung up" in await broken(line)
    await eventually(transport.was_aborted, "the other end closes nothing")


async def test_hung_up_line_reads_no_more_when_the_other_end_does_not_cease_to_send() -> None:
    line, transport = a_line()
    line.data_received(framed(*[b"x"] * 100))
    assert not transport.is_reading()
    line.hang_up()
    assert (
        transport.is_reading()
    )  # else the other end could not read the last frames before a reset
    for _ in range(16):
        assert transport.is_reading()
        line.data_received(bytes(64 << 10))
    line.data_received(b"x")
    assert not transport.is_reading()
    assert line.unsent_bytes == 0


async def test_line_without_half_a_close_closes_at_once() -> None:
    line, transport = a_line(half_closes=False)
    line.hang_up()
    assert transport.closed
    line.connection_lost(None)


@virtually
async def test_flush_waits_for_the_other_end_but_not_for_ever() -> None:
    loop = asyncio.get_running_loop()
    line, transport = a_line()
    line.send(b"last")
    flushing = asyncio.ensure_future(line.flush())
    await asyncio.sleep(0.5)
    assert transport.written == [framed(b"last")]
    assert not flushing.done()
    line.connection_lost(None)
    await flushing
    assert loop.time() == pytest.approx(0.5, abs=0.01)

    silent, transport = a_line()
    await silent.flush()
    assert loop.time() == pytest.approx(1.5, abs=0.01)
    await asyncio.sleep(0.01)
    assert transport.was_aborted()


async def test_aborted_line_loses_what_was_not_sent_and_what_was_not_received() -> None:
    line, transport = a_line()
    line.data_received(framed(b"unread"))
    line.send(b"unsent")
    line.abort()
    line.abort()
    assert transport.was_aborted()
    assert line.unsent_bytes == 0
    assert "hung up" in await broken(line)
    await asyncio.sleep(0)
    assert transport.written == []


async def test_line_is_closed_at_the_end_of_its_context_at_once_when_the_other_end_is_silent() -> (
    None
):
    line, transport = a_line()

    async def wait_in_vain() -> None:
        async with line, time_limit(0):
            await line.receive()

    with pytest.raises(TimeoutError):
        await wait_in_vain()
    assert transport.was_aborted()
    assert not transport.has_ended()


async def test_nothing_is_sent_on_a_line_that_has_ended() -> None:
    line, transport = a_line()
    line.eof_received()
    line.send(b"nobody reads it")
    await asyncio.sleep(0)
    assert transport.written == []
    assert line.unsent_bytes == 0
