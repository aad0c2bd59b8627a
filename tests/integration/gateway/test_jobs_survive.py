"""Jobs survive kill -9: whatever was accepted is made, with its whole body, and called back."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from tests.kit.engines.nats_servers import (
    NatsServer,
    a_shared_queue,
    messages,
    nats_server,
    settings_for,
)
from tests.kit.places import ROOT
from tests.kit.processes.job_process import body_of
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.group("jobs_survive", seconds=30)

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
async def a_process(folder: Path, url: str, nats_url: str = "") -> AsyncIterator[Process]:
    program = (sys.executable, "-m", "tests.kit.processes.job_process", str(folder), url, nats_url)
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
        while not kept >= set(ids):
            line = (await process.stdout.readline()).decode().strip()
            if not line:
                return
            kept.add(line)
    except ConnectionError:
        return  # it was killed


@pytest.mark.slow
async def test_no_accepted_job_is_lost_when_the_process_is_killed_again_and_again(
    tmp_path: Path,
) -> None:
    chance = Random(5)
    kept: set[str] = set()
    killed_with_work = 0

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
            last = await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)
            assert last.decode().split() == ["dead", "0"]
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
        assert receiver.wrong == []
        assert {one for one in kept if int(one) % 3} == set(receiver.got)
    lines = [line.split() for line in (tmp_path / "made").read_text().splitlines()]
    assert len(kept) == KILLS * 100
    assert {call_id for call_id, _ in lines} == kept
    assert {verdict for _, verdict in lines} == {"right"}
    assert killed_with_work >= 2, "the test killed nothing in the middle"
    assert list((tmp_path / "bodies").iterdir()) == []


@dataclass
class SentCalls:
    """What is to be kept, and what was said to be."""

    ids: list[str] = field(default_factory=list)
    kept: set[str] = field(default_factory=set)


async def one_turn(
    server: NatsServer, folders: tuple[Path, Path], url: str, sent: SentCalls, number: int
) -> None:
    """Two gateways are sent calls to keep; one gateway, or their server, is killed meanwhile."""
    chance = Random(number)
    async with (
        a_process(folders[0], url, server.url) as first,
        a_process(folders[1], url, server.url) as second,
    ):
        telling = [
            asyncio.create_task(tell(each, sent.ids[at::2], sent.kept))
            for at, each in enumerate((first, second))
        ]
        await asyncio.sleep(chance.uniform(0.05, 0.3))
        if number % 3:
            (first, second)[number % 2].kill()
            await asyncio.sleep(chance.uniform(0.0, 0.2))
        else:
            server.kill()
            server.start()
        for each in (first, second):
            with suppress(ProcessLookupError):  # one of them is dead already
                each.kill()
        await asyncio.gather(*telling)


@pytest.mark.slow
async def test_no_accepted_job_is_lost_when_gateways_and_their_server_are_killed(
    tmp_path: Path,
) -> None:
    """Two gateways have one queue on NATS; each turn ends with a kill -9 of one of the three."""
    sent = SentCalls()
    folders = (tmp_path / "a", tmp_path / "b")

    for folder in folders:
        folder.mkdir()
    with nats_server(tmp_path / "nats") as server:
        async with a_receiver() as receiver:
            for number in range(6):
                sent.ids = [one for one in sent.ids if one not in sent.kept]
                sent.ids += [str(number * 100 + at) for at in range(100)]
                await one_turn(server, folders, receiver.url, sent, number)
            async with a_process(folders[0], receiver.url, server.url) as process:
                await tell(process, [one for one in sent.ids if one not in sent.kept], sent.kept)
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(b"end\n")
                last = await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)
                assert last.decode().split() == ["dead", "0"]
            assert receiver.wrong == []
            assert {one for one in sent.kept if int(one) % 3} <= set(receiver.got)

        async def no_parts() -> bool:
            return not await messages(server, "gpufaas_parts")

        # What the killed had begun to write goes as well.
        tidy = settings_for(server.url, orphan_s=0.6)
        async with a_shared_queue(tmp_path / "c", tidy):
            await eventually(no_parts, "the parts are removed")
    lines = [
        line.split() for folder in folders for line in (folder / "made").read_text().splitlines()
    ]
    assert len(sent.kept) == 600
    assert {call_id for call_id, _ in lines} >= sent.kept
    assert {verdict for _, verdict in lines} == {"right"}


def made(folder: Path) -> set[str]:
    path = folder / "made"
    return {line.split()[0] for line in path.read_text().splitlines()} if path.exists() else set()
