"""Output of instances: cut into lines, kept within bounds, and never the event loop's master."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gateway_ext.model import FunctionId
from gateway_ext.ports import LogQuery
from gateway_ext.providers.managed.logs import FunctionLog, OutputBudget, OutputPipe
from tests.kit.processes.process_functions import call, world
from tests.kit.waiting import eventually

MIB = 1 << 20


class Stored:
    """Lines as they come, and how many came in one turn of the loop."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.at_once: list[int] = []

    def add(self, lines: list[str]) -> None:
        self.texts += lines
        self.at_once.append(len(lines))


@asynccontextmanager
async def pipe() -> AsyncIterator[tuple[Stored, OutputPipe, int]]:
    """What is stored, the reader, and where to write; the writing end may be closed inside."""
    output, written = os.pipe()
    stored = Stored()
    reader = OutputPipe(output, stored.add)
    try:
        yield stored, reader, written
    finally:
        reader.close()


async def test_pipe_is_cut_into_lines() -> None:
    async with pipe() as (stored, reader, written):
        parts = (b"on", b"e\ntwo\r\nth", *[b"x" * 10_000] * 7, b"\n", b"\xff last")
        for part in parts:
            os.write(written, part)
            await asyncio.sleep(0.01)
        os.close(written)
        await asyncio.wait_for(reader.ended, 60)
    assert [text[:5] for text in stored.texts] == ["one", "two", "thxxx", "xxxxx", "\ufffd las"]
    assert max(map(len, stored.texts)) <= 64 << 10


async def test_endless_writer_is_read_a_little_in_each_turn_and_then_waits() -> None:
    async with pipe() as (stored, reader, written):
        with subprocess.Popen(["yes"], stdout=written) as endless:
            os.close(written)
            turns = 0
            while len(stored.at_once) < 40:
                await asyncio.sleep(0)
                turns += 1
            assert turns >= len(stored.at_once), "several parts were read in one turn"
            assert max(stored.at_once) <= 8192, "16 KiB of lines with two bytes"
            endless.kill()
            await asyncio.wait_for(reader.ended, 60)
    assert "were dropped" in stored.texts[-1]


async def test_quiet_one_is_stored_whole_beside_an_endless_writer(tmp_path: Path) -> None:
    log = FunctionLog(FunctionId("openfaas-fn", "f"), tmp_path, 8 * MIB)
    async with pipe() as (_, _, noisy), pipe() as (quiet, reader, written):
        with subprocess.Popen(["yes"], stdout=noisy) as endless:
            os.close(noisy)
            for number in range(100):
                os.write(written, b"%d\n" % number)
                await asyncio.sleep(0.001)
            os.close(written)
            await asyncio.wait_for(reader.ended, 60)
            endless.kill()
    assert quiet.texts == [str(number) for number in range(100)]
    log.close()


def test_endless_lines_are_kept_and_read_at_a_bounded_rate() -> None:
    budget = OutputBudget(now_s=0.0)
    now_s, kept, read_bytes = 0.0, 0, 0
    while now_s < 60:
        lines = [b"y"] * 8192
        kept += len(budget.keep(lines, 2 * len(lines), now_s))
        read_bytes += 2 * len(lines)
        now_s += max(budget.pause_s(len(lines), 2 * len(lines), now_s), 0.0001)
    assert kept <= 5_000 + 61 * 1_000
    assert kept >= 60 * 1_000
    assert read_bytes <= 2 * 61 * 20_000 + 2 * 8192
    assert budget.has_dropped
    text = budget.notice()
    assert text.startswith(f"{read_bytes // 2 - kept} lines (")
    assert not budget.notice(), "a second notice says the same once more"


def test_large_lines_count_by_their_bytes() -> None:
    budget = OutputBudget(now_s=0.0)
    kept = sum(len(budget.keep([b"x" * 65_536] * 4, 4 * 65_536, now / 10)) for now in range(100))
    assert kept * 65_536 <= 2 * MIB + 10 * MIB / 2
    budget = OutputBudget(now_s=0.0)
    read_bytes, now_s = 0, 0.0
    while now_s < 10:
        read_bytes += 65_536
        now_s += max(budget.pause_s(1, 65_536, now_s), 0.0001)
    assert read_bytes <= 10.1 * 4 * MIB


def test_burst_after_silence_is_kept_whole() -> None:
    budget = OutputBudget(now_s=0.0)
    assert len(budget.keep([b"x" * 20] * 5_000, 100_000, 0.0)) == 5_000
    assert not budget.keep([b"x"], 1, 0.0)
    assert len(budget.keep([b"x" * 20] * 5_000, 100_000, 10.0)) == 5_000
    assert budget.pause_s(100, 2_000, 20.0) == 0


async def test_log_says_what_was_dropped_when_a_function_writes_without_end() -> None:
    writes = "import os\nwhile True:\n    os.write(1, b'y\\n' * 4096)\n"
    async with world() as there:
        there.build("noisy", writes)
        there.build("quiet")
        noisy = await there.deploy("noisy")
        quiet = await there.deploy("quiet")
        (endpoint,) = await there.ready(quiet)

        async def is_told() -> bool:
            return any("lines (" in line.text for line in await there.log(noisy, tail=2_000))

        await eventually(is_told, "the notice")
        assert await call(endpoint) == b"hello"


async def test_last_line_of_an_instance_is_found_among_those_of_another(tmp_path: Path) -> None:
    log = FunctionLog(FunctionId("openfaas-fn", "f"), tmp_path, 8 * MIB)
    log.write("mine", "before", 'named "noisy"', " ")
    for _ in range(10):
        log.write("noisy", *["y"] * 1_000)
    assert log.last_line("mine") == 'named "noisy"'
    assert log.last_line("noisy") == "y"
    assert log.last_line("none") == ""
    assert log.last_at("none") is None
    found = [line.text async for line in log.read(LogQuery(FunctionId("openfaas-fn", "f"), tail=1))]
    assert found == ["y"]
    log.close()
