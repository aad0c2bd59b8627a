"""A client of a GPU manager that says exactly what a test wants, and the manager to talk to."""

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Self

import pytest

from cache_manager.model import MIB
from gpu_manager.api import NodeSettings, UnixAddress
from gpu_manager.devices.base import Device
from gpu_manager.frames import FrameStream
from gpu_manager.images import ImageWriter
from gpu_manager.runtime import Observer, Runtime
from gpufaas.node import EmbeddedNode, embedded_node
from tests.in_memory_runtime import InMemoryRuntime
from torch_shim.dialing import connect
from torch_shim.digests import ImageTable, image_digest, lay_out, parts_of, possession_proof
from torch_shim.errors import ConnectionLost
from torch_shim.protocol import VERSION, Kind
from torch_shim.wire import Frame


@dataclass(slots=True)
class Weights:
    """An image that a client has, and its sealed memory."""

    content: bytes
    table: ImageTable
    digest: str
    descriptor: int

    @property
    def offer(self) -> dict[str, Any]:
        """How it is announced."""
        rows = [list(row) for row in self.table.storages]
        return {"digest": self.digest, "table": rows, "total": self.table.total_bytes}

    def proof(self, nonce: str) -> str:
        """That the client has it."""
        return possession_proof(parts_of(self.descriptor, self.table), nonce)

    def close(self) -> None:
        os.close(self.descriptor)


def weights(content: bytes) -> Weights:
    """An image of one storage."""
    table = lay_out([len(content)])
    writer = ImageWriter(table)
    writer.write(content)
    descriptor = writer.seal()
    return Weights(content, table, image_digest(parts_of(descriptor, table)), descriptor)


class Refused(Exception):
    """The manager said REFUSED."""

    def __init__(self, failure: str, message: str, facts: dict[str, Any]) -> None:
        self.failure = failure
        self.facts = facts
        super().__init__(f"{failure}: {message}")


@dataclass(slots=True)
class Client:
    """One connection; requests are answered one after the other unless a test says otherwise."""

    stream: FrameStream
    hints: list[int] = field(default_factory=list)
    welcome: dict[str, Any] = field(default_factory=dict)
    _number: int = 0

    @classmethod
    async def open(cls, address: str) -> Self:
        """Connect, and say nothing yet."""
        return cls(FrameStream(await asyncio.to_thread(connect, address)))

    async def hello(self, credential: str, session: str = "", **more: Any) -> dict[str, Any]:
        """Say who it is."""
        fields = {
            "version": VERSION,
            "credential": credential,
            "session": session or secrets.token_hex(16),
            "pid": os.getpid(),
            "role": "shim",
        }
        self.welcome, _ = await self.ask(Kind.HELLO, fields | more)
        return self.welcome

    async def ask(
        self, kind: Kind, fields: Any, body: bytes = b"", descriptors: Sequence[int] = ()
    ) -> tuple[dict[str, Any], tuple[int, ...]]:
        """One request and its answer; Refused where it was."""
        self._number += 1
        await self.stream.send(kind, [self._number, fields], [body], descriptors)
        frame = await self.answer()
        assert frame.meta[0] == self._number
        if frame.kind is Kind.REFUSED:
            raise Refused(*frame.meta[1:])
        assert frame.kind is Kind.ANSWER
        return frame.meta[1], frame.descriptors

    async def tell(self, kind: Kind, fields: Any, body: bytes = b"") -> None:
        """Something that has no answer."""
        await self.stream.send(kind, [0, fields], [body])

    async def answer(self) -> Frame:
        """The next frame that is no hint."""
        while True:
            frame = await self.stream.read()
            if frame.kind is not Kind.LEASE_ENDED:
                return frame
            self.hints.append(frame.meta[1]["lease"])

    async def hint(self) -> int:
        """The next lease that the manager says it ended."""
        while not self.hints:
            frame = await self.stream.read()
            assert frame.kind is Kind.LEASE_ENDED
            self.hints.append(frame.meta[1]["lease"])
        return self.hints.pop(0)

    async def upload(self, image: Weights) -> None:
        """Have the node keep this image."""
        answer, _ = await self.ask(Kind.UPLOAD, image.offer, descriptors=[image.descriptor])
        assert answer == {"digest": image.digest}

    async def acquire(
        self, *digests: str, workers: Sequence[str] = (), **more: Any
    ) -> tuple[dict[str, Any], list[socket.socket]]:
        """A lease, and the shim's ends of new channels."""
        fields = {"models": list(digests), "batch": 1, "request": None, "deadline_s": None}
        answer, found = await self.ask(Kind.ACQUIRE, fields | {"workers": list(workers)} | more)
        return answer, [socket.socket(fileno=descriptor) for descriptor in found]

    def close(self) -> None:
        self.stream.close()


@dataclass(slots=True)
class Manager:
    """A manager whose models live in this process."""

    node: EmbeddedNode
    runtime: InMemoryRuntime
    _clients: list[Client] = field(default_factory=list)

    def credential(self, function: str = "function", tenant: str = "team") -> str:
        return self.node.credential(tenant, function)

    @property
    def address(self) -> str:
        return str(self.node.addresses[0])

    async def stranger(self, address: str | None = None) -> Client:
        """A connection that has said nothing."""
        client = await Client.open(address or self.address)
        self._clients.append(client)
        return client

    async def client(
        self,
        function: str = "function",
        tenant: str = "team",
        session: str = "",
        tcp: bool = False,  # noqa: FBT001, FBT002 - read at the call
    ) -> Client:
        """A connection of this function."""
        client = await self.stranger(str(self.node.addresses[1]) if tcp else None)
        await client.hello(self.credential(function, tenant), session)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()


@asynccontextmanager
async def manager(gpu_mib: int = 1024, **more: Any) -> AsyncIterator[Manager]:
    """A manager on an abstract socket, with a runtime without processes."""
    runtimes: list[InMemoryRuntime] = []

    async def make(observer: Observer, _devices: Sequence[Device]) -> Runtime:
        runtimes.append(InMemoryRuntime(observer))
        runtimes[0].load_s = runtimes[0].unload_s = 0.0
        return runtimes[0]

    listen = more.pop("listen", (UnixAddress(f"@gpufaas-test-{secrets.token_hex(8)}"),))
    values: dict[str, Any] = {"devices": "cpu:1", "gpu_memory_bytes": gpu_mib * MIB}
    name = more.pop("name", "node")
    settings = NodeSettings(name, listen, **(values | {"drain_s": 0.5} | more))
    async with embedded_node(settings, make_runtime=make) as node:
        found = Manager(node, runtimes[0])
        try:
            yield found
        finally:
            found.close()


def really(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test that is a coroutine, on real time."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 20.0))

    return run


async def refusal(asking: Coroutine[Any, Any, Any]) -> str:
    """How a request was refused."""
    with pytest.raises(Refused) as refused:
        await asking
    return refused.value.failure


async def closed(client: Client) -> bool:
    """Whether the manager hangs up."""
    try:
        while True:
            await client.stream.read()
    except ConnectionLost:
        return True
