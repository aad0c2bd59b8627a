"""A real node in a thread, and a blocking client that runs hand-made programs on its workers."""

import asyncio
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cache_manager.model import MIB
from gpu_manager.api import NodeSettings, UnixAddress
from gpufaas.node import EmbeddedNode, embedded_node
from tests.manager_client import Weights
from torch_shim.channel import Channel
from torch_shim.dialing import connect
from torch_shim.errors import RemoteFailure, WireError
from torch_shim.programs import Named, Program, Ref, Step, Tuple, digest_of
from torch_shim.protocol import VERSION, Kind
from torch_shim.wire import Frame, Wire

FLOAT_BYTES = 4
T = TypeVar("T")

# Two inputs, of which the second is a row of the weights: their sum.
ADD = Program(2, (), (Step("o:add", [Ref(0), Ref(1)]),), Tuple([Ref(2)]))


def needs(mib: int) -> Program:
    """The sum, times that of as many ones as take this much memory."""
    filled = Step("t:torch.ones", [mib * MIB // FLOAT_BYTES], {"dtype": Named("dtype", "float32")})
    total = Step("m:sum", [Ref(2)])
    steps = (filled, total, Step("o:add", [Ref(0), Ref(1)]), Step("o:mul", [Ref(4), Ref(3)]))
    return Program(2, (), steps, Tuple([Ref(5)]))


class NodeThread:
    """A node with real workers, on a loop of its own."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="node")
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def address(self) -> str:
        return str(self.node.addresses[0])

    def credential(self, function: str = "function", tenant: str = "team") -> str:
        return self.node.credential(tenant, function)

    def run(self, work: Callable[[EmbeddedNode], T]) -> T:
        """Look at the node, on its own thread."""

        async def there() -> T:
            return work(self.node)

        return self.do(there())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the node's loop do something."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30.0)

    def pids(self) -> list[int]:
        """The processes of the loaded models."""

        def found(node: EmbeddedNode) -> list[int]:
            gpus = node.manager.node.gpus.values()
            models = [resident for gpu in gpus for resident in gpu.residents.values()]
            return [model.hosted.pid for model in models if model.hosted is not None]

        return self.run(found)

    def leases(self) -> int:
        """How many are in force."""
        return self.run(lambda node: len(node.manager.node.leases))

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._live())

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        try:
            async with embedded_node(self._settings) as self.node:
                self._ready.set()
                await self._stopping.wait()
        except BaseException as error:
            self._failure = error
            self._ready.set()
            raise


@contextmanager
def node_thread(gpu_mib: int = 512, **more: Any) -> Iterator[NodeThread]:
    """A node with one emulated GPU, on an abstract socket."""
    listen = (UnixAddress(f"@gpufaas-test-{secrets.token_hex(8)}"),)
    values: dict[str, Any] = {
        "listen": listen,
        "devices": "cpu:1",
        "gpu_memory_bytes": gpu_mib * MIB,
        "drain_s": 0.5,
    }
    node = NodeThread(NodeSettings("node", **(values | more)))
    try:
        yield node
    finally:
        node.stop()


class Control:
    """A control connection that asks one thing after the other."""

    def __init__(self, address: str, hello: dict[str, Any]) -> None:
        self.wire = Wire(connect(address))
        self._number = 0
        try:
            self.ask(Kind.HELLO, hello)
        except BaseException:
            self.close()
            raise

    def ask(self, kind: Kind, fields: dict[str, Any], descriptors: Sequence[int] = ()) -> Frame:
        """The answer; RemoteFailure where it is a refusal."""
        self._number += 1
        self.wire.send(kind, [self._number, fields], (), descriptors)
        while (frame := self.wire.receive()).kind is Kind.LEASE_ENDED:
            pass
        if frame.kind is Kind.REFUSED:
            raise RemoteFailure(*frame.meta[1:])
        assert frame.kind is Kind.ANSWER
        return frame

    def tell(self, kind: Kind, fields: dict[str, Any]) -> None:
        self.wire.send(kind, [0, fields])

    def close(self) -> None:
        self.wire.close()


@dataclass(slots=True)
class Function:
    """One function process, as far as the node can tell."""

    address: str
    credential: str
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    control: Control = field(init=False)
    lease: int = 0
    worker: str = ""
    _channels: dict[str, Channel] = field(default_factory=dict)
    _programs: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.control = Control(self.address, self._hello("shim"))

    def upload(self, weights: Weights) -> None:
        """Have the node keep these weights."""
        self.control.ask(Kind.UPLOAD, weights.offer, descriptors=[weights.descriptor])

    def acquire(
        self, weights: Weights, deadline_s: float | None = None, token: str | None = None
    ) -> None:
        """Hold a lease of this model, the one of a token if it is good, with a channel to it."""
        fields = {"models": [weights.digest], "batch": 1, "request": None}
        if token is not None:
            fields |= {"token": token, "follow": True}
        fields |= {"deadline_s": deadline_s, "workers": list(self._channels)}
        frame = self.control.ask(Kind.ACQUIRE, fields)
        answer = frame.meta[1]
        self.lease = answer["lease"]
        self.worker = answer["workers"][weights.digest]
        if self.control.wire.local:
            ends = [Wire(socket.socket(fileno=descriptor)) for descriptor in frame.descriptors]
        else:
            ends = [self._dial(worker) for worker in answer["fresh"]]
        for worker, end in zip(answer["fresh"], ends, strict=True):
            self._channels[worker] = Channel(end)

    def call(self, weights: Weights, program: Program = ADD, x: float = 1.0) -> list[float]:
        """x + w for one row of the weights, by the worker of the lease."""
        channel = self._channels[self.worker]
        packed = program.pack()
        number = self._programs.setdefault(digest_of(packed), len(self._programs) + 1)
        channel.define(number, digest_of(packed), packed)
        shape, size = [4], 4 * FLOAT_BYTES
        image = [0, weights.digest, 0, len(weights.content)]
        channel.bind(number, 1, {1: [image, "float32", shape, [1], 0]})
        inputs = [[[2, 0, size, 0, 0], "float32", shape, [1], 0], None]
        options = [None, None, [0], None]
        try:
            frame = channel.call(
                [self.lease, number, 1, inputs, options], [struct.pack("4f", *[x] * 4)]
            )
        except WireError:
            self._channels.pop(self.worker).close()
            raise
        return list(struct.unpack("4f", frame.body[:size]))

    def use(self, weights: Weights, program: Program = ADD, x: float = 1.0) -> list[float]:
        """Acquire and call, and once more where the lease had ended or its worker was lost."""
        for _ in range(3):
            self.acquire(weights)
            try:
                return self.call(weights, program, x)
            except RemoteFailure as failure:
                if failure.failure != "lease not in force":
                    raise
        raise AssertionError("every lease ended before its first call")

    def release(self) -> None:
        self.control.tell(Kind.RELEASE, {"lease": self.lease})

    def close(self) -> None:
        self.control.close()
        for channel in self._channels.values():
            channel.close()

    def _hello(self, role: str, **more: str) -> dict[str, Any]:
        fields = {"version": VERSION, "credential": self.credential, "session": self.session}
        return fields | {"pid": os.getpid(), "role": role} | more

    def _dial(self, worker: str) -> Wire:
        return Control(self.address, self._hello("channel", worker=worker)).wire


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text(encoding="ascii")[:200]
    except (FileNotFoundError, ProcessLookupError):
        return False


def soon(true: Callable[[], bool], within_s: float) -> bool:
    """Whether something becomes true in time."""
    deadline_s = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True
