"""A client that sends a GPU manager exactly what a test wants, and a manager to connect to."""

import asyncio
import os
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from cache_manager.model.ids import MIB
from common.addresses import UnixAddress
from gpu_manager.api import NodeSettings
from gpu_manager.devices.gpu_device import GpuDevice
from gpu_manager.frame_stream import FrameStream
from gpu_manager.runtimes.runtime import Observer, Runtime
from gpu_manager.weights.sealed_images import ImageWriter
from gpufaas.embedded_node import EmbeddedNode, embedded_node
from tests.kit.nodes.in_memory_runtime import InMemoryRuntime
from torch_shim.errors import ConnectionLost
from torch_shim.wire.connections import connect
from torch_shim.wire.image_digests import (
    ImageTable,
    image_digest,
    lay_out,
    pack_sizes,
    parts_of,
    possession_proof,
)
from torch_shim.wire.protocol import Frame, FrameKind


@dataclass(slots=True)
class SealedWeights:
    """An image of a client: its content, its table and its sealed memory."""

    content: bytes
    table: ImageTable
    digest: str
    descriptor: int

    @property
    def offer(self) -> dict[str, Any]:
        """The fields of the image in UPLOAD."""
        sizes = pack_sizes(self.table)
        return {"digest": self.digest, "sizes": sizes, "total": self.table.total_bytes}

    def proof(self, nonce: str) -> str:
        """The proof that the client has the image."""
        return possession_proof(parts_of(self.descriptor, self.table), nonce)

    def close(self) -> None:
        os.close(self.descriptor)


def weights(content: bytes) -> SealedWeights:
    """An image of one storage."""
    table = lay_out([len(content)])
    writer = ImageWriter(table)
    writer.write(content)
    descriptor = writer.seal()
    return SealedWeights(content, table, image_digest(parts_of(descriptor, table)), descriptor)


class ManagerRefused(Exception):
    """The manager answered with REFUSED."""

    def __init__(self, failure: str, message: str, facts: dict[str, Any]) -> None:
        self.failure = failure
        self.facts = facts
        super().__init__(f"{failure}: {message}")


@dataclass(slots=True)
class ManagerClient:
    """One connection; each request waits for its answer unless a test splits the two."""

    stream: FrameStream
    hints: list[int] = field(default_factory=list)
    welcome: dict[str, Any] = field(default_factory=dict)
    _number: int = 0

    @classmethod
    async def open(cls, address: str) -> Self:
        """Connect without sending anything."""
        return cls(FrameStream(await asyncio.to_thread(connect, address)))

    async def hello(self, credential: str, session: str = "", **more: Any) -> dict[str, Any]:
        """Identify the client to the manager."""
        fields = {
            "credential": credential,
            "session": session or secrets.token_hex(16),
            "pid": os.getpid(),
            "role": "shim",
        }
        self.welcome, _ = await self.ask(FrameKind.HELLO, fields | more)
        return self.welcome

    async def ask(
        self, kind: FrameKind, fields: Any, body: bytes = b"", descriptors: Sequence[int] = ()
    ) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Send one request and wait for its answer; ManagerRefused where the answer is REFUSED."""
        self._number += 1
        await self.stream.send(kind, [self._number, fields], [body], descriptors)
        frame = await self.answer()
        assert frame.meta[0] == self._number
        if frame.kind is FrameKind.REFUSED:
            raise ManagerRefused(*frame.meta[1:])
        assert frame.kind is FrameKind.ANSWER
        return frame.meta[1], frame.descriptors

    async def tell(self, kind: FrameKind, fields: Any, body: bytes = b"") -> None:
        """Send a frame that has no answer."""
        await self.stream.send(kind, [0, fields], [body])

    async def answer(self) -> Frame:
        """The next frame that is not LEASE_ENDED."""
        while True:
            frame = await self.stream.read()
            if frame.kind is not FrameKind.LEASE_ENDED:
                return frame
            self.hints.append(frame.meta[1]["lease"])

    async def hint(self) -> int:
        """The next lease that the manager reports as ended."""
        while not self.hints:
            frame = await self.stream.read()
            assert frame.kind is FrameKind.LEASE_ENDED
            self.hints.append(frame.meta[1]["lease"])
        return self.hints.pop(0)

    async def upload(self, image: SealedWeights) -> None:
        """Upload an image to the node."""
        answer, _ = await self.ask(FrameKind.UPLOAD, image.offer, descriptors=[image.descriptor])
        assert answer == {"digest": image.digest}

    async def acquire(
        self, *digests: str, workers: Sequence[str] = (), **more: Any
    ) -> tuple[dict[str, Any], list[socket.socket]]:
        """A lease, and the shim's ends of new channels."""
        fields = {"models": list(digests), "batch": 1, "request": None, "deadline_s": None}
        answer, found = await self.ask(
            FrameKind.ACQUIRE, fields | {"workers": list(workers)} | more
        )
        return answer, [socket.socket(fileno=descriptor) for descriptor in found]

    def close(self) -> None:
        self.stream.close()


@dataclass(slots=True)
class Manager:
    """A manager whose models live in this process."""

    node: EmbeddedNode
    runtime: InMemoryRuntime
    _clients: list[ManagerClient] = field(default_factory=list)

    def credential(self, function: str = "function", tenant: str = "team") -> str:
        return self.node.credential(tenant, function)

    @property
    def address(self) -> str:
        return str(self.node.addresses[0])

    async def stranger(self, address: str | None = None) -> ManagerClient:
        """A connection without a HELLO."""
        client = await ManagerClient.open(address or self.address)
        self._clients.append(client)
        return client

    async def client(
        self,
        function: str = "function",
        tenant: str = "team",
        session: str = "",
        tcp: bool = False,  # noqa: FBT001, FBT002 - read at the call
    ) -> ManagerClient:
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

    async def make(observer: Observer, _devices: Sequence[GpuDevice]) -> Runtime:
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


async def refusal(asking: Coroutine[Any, Any, Any]) -> str:
    """The failure with which a request is refused; AssertionError where it is not."""
    try:
        await asking
    except ManagerRefused as refused:
        return refused.failure
    raise AssertionError("the request was not refused")


async def closed(client: ManagerClient) -> bool:
    """Whether the manager closes the connection."""
    try:
        while True:
            await client.stream.read()
    except ConnectionLost:
        return True


def model(first: float, mib: int = 1) -> SealedWeights:
    """Weights whose first row is this number four times."""
    return weights(struct.pack("4f", *[first] * 4) + bytes(mib * MIB - 16))
