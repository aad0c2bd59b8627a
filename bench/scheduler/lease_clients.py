"""The clients of the scheduler's bench, by hand: a library would cost most of the time."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median, quantiles

from msgspec import msgpack

from bench.measure.child_process import ChildProcess, ParentPipe, child_process
from bench.measure.load_figures import LoadFigures
from bench.scheduler.lease_processes import SECRET
from common.frame_line import FrameLine, LineBroken
from common.stream_upgrade import dial
from scheduler.service.access import ApiRole, token
from scheduler.wire.caller_stream import MAX_FRAME_BYTES, PATH
from scheduler.wire.codec import VERSION

MODELS = 8


@dataclass(frozen=True, slots=True)
class LeaseLoad:
    """How many clients acquire and release leases for so many seconds; all share one stream."""

    clients: int
    seconds: float
    over_stream: bool


@contextmanager
def lease_clients() -> Iterator[ChildProcess]:
    """A process of clients; it answers the URL of a server and a LeaseLoad with LoadFigures."""
    with child_process(_put_loads) as clients:
        yield clients


@dataclass(slots=True)
class _LeaseTimings:
    """What the clients of one load saw: the seconds of each acquire, and the pairs completed."""

    acquires_s: list[float] = field(default_factory=list)
    pairs: int = 0


async def _put_loads(parent: ParentPipe) -> None:
    parent.ready()
    while (order := await parent.order()) is not None:
        parent.answer(await _figures(*order))


async def _figures(url: str, load: LeaseLoad) -> LoadFigures:
    """The figures of pairs of acquire and release; the latency is that of the acquire."""
    seen = _LeaseTimings()
    began_s, processor_s = time.perf_counter(), time.process_time()
    until_s = began_s + load.seconds
    if load.over_stream:
        await _over_stream(url, load.clients, until_s, seen)
    else:
        port = int(url.rpartition(":")[2])
        clients = range(load.clients)
        await asyncio.gather(*(_over_http(port, number, until_s, seen) for number in clients))
    elapsed_s = time.perf_counter() - began_s
    return LoadFigures(
        rate=seen.pairs / elapsed_s,
        p50_s=median(seen.acquires_s),
        p99_s=quantiles(seen.acquires_s, n=100)[98],
        failed=0,
        generator=(time.process_time() - processor_s) / elapsed_s,
    )


async def _over_http(port: int, number: int, until_s: float, seen: _LeaseTimings) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    bearer = token(SECRET, ApiRole.CALLER).encode()

    async def post(path: bytes, body: bytes) -> bytes:
        head = b"POST %s HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer %s\r\n"
        length = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        writer.write(head % (path, bearer) + length + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if answer.startswith(b"http/1.1 204"):
            return b""
        assert answer.startswith(b"http/1.1 200"), answer
        _, _, rest = answer.partition(b"content-length: ")
        return await reader.readexactly(int(rest[: rest.index(b"\r")]))

    asked = 0
    while (now_s := time.perf_counter()) < until_s:
        asked += 1
        model = (number + asked) % MODELS
        request = b'{"request":"c%d-%d","function":"bench/f","models":["m%d"]}'
        answer = await post(b"/acquire", request % (number, asked, model))
        seen.acquires_s.append(time.perf_counter() - now_s)
        await post(b"/release", b'{"lease":%d}' % json.loads(answer)["lease"])
        seen.pairs += 1
    writer.close()


async def _over_stream(url: str, clients: int, until_s: float, seen: _LeaseTimings) -> None:
    headers = {"Authorization": f"Bearer {token(SECRET, ApiRole.CALLER)}"}
    async with await dial(url, PATH, headers, MAX_FRAME_BYTES) as line:
        present = {"type": "Present", "version": VERSION, "caller": "bench"}
        line.send(msgpack.encode(present))
        load = _StreamLoad(line, until_s, seen)
        for number in range(clients):
            load.ask(number)
        try:
            await line.pump(load.take)
        except LineBroken:
            assert not load.asked, "the scheduler hung up"


class _StreamLoad:
    """All clients of one stream: each asks again as soon as it has given its lease back."""

    def __init__(self, line: FrameLine, until_s: float, seen: _LeaseTimings) -> None:
        self.asked: dict[int, tuple[int, float]] = {}
        self._line = line
        self._until_s = until_s
        self._seen = seen
        self._calls = 0

    def ask(self, client: int) -> None:
        """This client wants a lease."""
        self._calls += 1
        call = self._calls
        models = [f"m{(client + call) % MODELS}"]
        request = {"id": f"c{call}", "function": "bench/f", "models": models}
        self.asked[call] = client, time.perf_counter()
        self._line.send(msgpack.encode({"type": "AskLease", "call": call, "request": request}))

    def take(self, frame: bytes) -> None:
        """Give the lease back, and ask anew until the time is up."""
        answer = msgpack.decode(frame)
        if answer["type"] != "Granted":
            assert answer["type"] in {"Leads", "Alive"}, answer
            return
        client, asked_s = self.asked.pop(answer["call"])
        now_s = time.perf_counter()
        self._seen.acquires_s.append(now_s - asked_s)
        self._seen.pairs += 1
        self._line.send(msgpack.encode({"type": "GiveBack", "lease": answer["placement"]["lease"]}))
        if now_s < self._until_s:
            self.ask(client)
        elif not self.asked:
            self._line.hang_up()
