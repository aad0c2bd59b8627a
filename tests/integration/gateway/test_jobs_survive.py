"""Jobs survive kill -9: whatever was accepted is made, with its whole body, and called back."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from tests.job_process import body_of

ROOT = Path(__file__).parents[3]
KILLS = 8


@dataclass
class Receiver:
    """Takes callbacks; what they bring is looked at at once."""

    url: str = ""
    got: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._take(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the sender was killed
        finally:
            writer.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(headers["content-length"]))
        call_id = headers["x-call-id"]
        if body != body_of(call_id)[::-1]:
            self.wrong.append(call_id)
        self.got[call_id] += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()


@asynccontextmanager
async def a_receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    async with await asyncio.start_server(receiver.take, "127.0.0.1") as server:
        receiver.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        yield receiver


@asynccontextmanager
async def a_process(folder: Path, url: str) -> AsyncIterator[Process]:
    program = (sys.executable, "-m", "tests.job_process", str(folder), url)
    process = await asyncio.create_subprocess_exec(*program, cwd=ROOT, stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    try:
        assert (await process.stdout.readline()).strip() == b"open"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def tell(process: Process, ids: list[str], kept: set[str]) -> None:
    """Have these kept, and note which were said to be."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for call_id in ids:
            process.stdin.write(f"{call_id}\n".encode())
        while line := (await process.stdout.readline()).decode().strip():
            kept.add(line)
            if kept >= set(ids):
                return
    except ConnectionError:
        return  # it was killed


@pytest.mark.slow
def test_no_accepted_job_is_lost_when_the_process_is_killed_again_and_again(
    tmp_path: Path,
) -> None:
    chance = Random(5)
    kept: set[str] = set()
    killed_with_work = 0

    async def test() -> None:
        nonlocal killed_with_work
        async with a_receiver() as receiver:
            ids: list[str] = []
            for turn in range(KILLS):
                # Those that were not said to be kept are sent once more, as a client would.
                ids = [one for one in ids if one not in kept]
                ids += [str(turn * 100 + at) for at in range(100)]
                async with a_process(tmp_path, receiver.url) as process:
                    telling = asyncio.create_task(tell(process, ids, kept))
                    await asyncio.sleep(chance.uniform(0.0, 0.25))
                    process.kill()
                    await telling
                killed_with_work += len(made(tmp_path)) < len(kept)
            async with a_process(tmp_path, receiver.url) as process:
                await tell(process, [one for one in ids if one not in kept], kept)
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(b"end\n")
                last = await asyncio.wait_for(process.stdout.readline(), 60)
                assert last.decode().split() == ["dead", "0"]
            assert receiver.wrong == []
            assert {one for one in kept if int(one) % 3} == set(receiver.got)

    asyncio.run(test())
    lines = [line.split() for line in (tmp_path / "made").read_text().splitlines()]
    assert len(kept) == KILLS * 100
    assert {call_id for call_id, _ in lines} == kept
    assert {verdict for _, verdict in lines} == {"right"}
    assert killed_with_work >= 2, "the test killed nothing in the middle"
    assert list((tmp_path / "bodies").iterdir()) == []


def made(folder: Path) -> set[str]:
    path = folder / "made"
    return {line.split()[0] for line in path.read_text().splitlines()} if path.exists() else set()
