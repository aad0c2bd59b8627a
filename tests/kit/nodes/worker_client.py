"""A blocking client of a node, which runs hand-made programs on the node's workers."""

import os
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cache_manager.model.ids import MIB
from tests.kit.nodes.manager_client import SealedWeights
from torch_shim.errors import RemoteFailure, WireError
from torch_shim.wire.connections import connect
from torch_shim.wire.data_channel import DataChannel
from torch_shim.wire.messages import Call, CallOptions, FromArea, FromImage, SentTensor
from torch_shim.wire.programs import Named, Program, ProgramStep, Ref, Tuple, digest_of
from torch_shim.wire.protocol import Frame, FrameKind, FrameSocket

FLOAT_BYTES = 4
T = TypeVar("T")

# Two inputs, of which the second is a row of the weights: their sum.
ADD = Program(2, (), (ProgramStep("o:add", [Ref(0), Ref(1)]),), Tuple([Ref(2)]))

# The same of the first four numbers of an input of any length.
FIRST = Program(
    2,
    (),
    (ProgramStep("m:narrow", [Ref(0), 0, 0, 4]), ProgramStep("o:add", [Ref(2), Ref(1)])),
    Tuple([Ref(3)]),
)


def needs(mib: int) -> Program:
    """The sum, times that of as many ones as take this much memory."""
    filled = ProgramStep(
        "t:torch.ones", [mib * MIB // FLOAT_BYTES], {"dtype": Named("dtype", "float32")}
    )
    total = ProgramStep("m:sum", [Ref(2)])
    steps = (
        filled,
        total,
        ProgramStep("o:add", [Ref(0), Ref(1)]),
        ProgramStep("o:mul", [Ref(4), Ref(3)]),
    )
    return Program(2, (), steps, Tuple([Ref(5)]))


class BlockingControl:
    """A control connection with one request at a time."""

    def __init__(self, address: str, hello: dict[str, Any]) -> None:
        self.wire = FrameSocket(connect(address))
        self._number = 0
        try:
            self.ask(FrameKind.HELLO, hello)
        except BaseException:
            self.close()
            raise

    def ask(
        self, kind: FrameKind, fields: dict[str, Any], descriptors: Sequence[int] = ()
    ) -> Frame:
        """The answer; RemoteFailure where it is a refusal."""
        self._number += 1
        self.wire.send(kind, [self._number, fields], (), descriptors)
        while (frame := self.wire.receive()).kind is FrameKind.LEASE_ENDED:
            pass
        if frame.kind is FrameKind.REFUSED:
            raise RemoteFailure(*frame.meta[1:])
        assert frame.kind is FrameKind.ANSWER
        return frame

    def notify(self, kind: FrameKind, fields: dict[str, Any]) -> None:
        self.wire.send(kind, [0, fields])

    def close(self) -> None:
        self.wire.close()


@dataclass(slots=True)
class FunctionClient:
    """One function process, as the node sees it."""

    address: str
    credential: str
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    control: BlockingControl = field(init=False)
    lease: int = 0
    worker: str = ""
    _channels: dict[str, DataChannel] = field(default_factory=dict)
    _programs: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.control = BlockingControl(self.address, self._hello("shim"))

    def upload(self, weights: SealedWeights) -> None:
        """Upload weights to the node."""
        self.control.ask(FrameKind.UPLOAD, weights.offer, descriptors=[weights.descriptor])

    def acquire(
        self, weights: SealedWeights, deadline_s: float | None = None, token: str | None = None
    ) -> None:
        """Hold a lease of this model, the one of a token if it is good, with a channel to it."""
        fields = {"models": [weights.digest], "batch": 1, "request": None}
        if token is not None:
            fields["token"] = token
        fields |= {"deadline_s": deadline_s, "workers": list(self._channels)}
        frame = self.control.ask(FrameKind.ACQUIRE, fields)
        answer = frame.meta[1]
        self.lease = answer["lease"]
        self.worker = answer["workers"][weights.digest]
        if self.control.wire.local:
            ends = [
                FrameSocket(socket.socket(fileno=descriptor)) for descriptor in frame.descriptors
            ]
        else:
            ends = [self._dial(worker) for worker in answer["fresh"]]
        for worker, end in zip(answer["fresh"], ends, strict=True):
            self._channels[worker] = DataChannel(end)

    def call(self, weights: SealedWeights, program: Program = ADD, x: float = 1.0) -> list[float]:
        """x + w for one row of the weights, by the worker of the lease."""
        return self._call(weights, program, struct.pack("4f", *[x] * 4))[0]

    def feed(self, weights: SealedWeights, size_bytes: int) -> tuple[list[float], float]:
        """w + 1 by a call with so many bytes of input, of which the first is looked at.

        The second figure is the seconds for which inputs and results were on their way to the GPU
        and back, as the worker measured it.
        """
        ones = struct.pack("4f", *[1.0] * 4)
        return self._call(weights, FIRST, ones + bytes(size_bytes - len(ones)))

    def _call(
        self, weights: SealedWeights, program: Program, content: bytes
    ) -> tuple[list[float], float]:
        channel = self._channels[self.worker]
        packed = program.pack()
        number = self._programs.setdefault(digest_of(packed), len(self._programs) + 1)
        channel.define(number, digest_of(packed), packed)
        shape, size = [4], 4 * FLOAT_BYTES
        image = FromImage(weights.digest, 0, len(weights.content))
        channel.bind(number, 1, {1: SentTensor(image, "float32", shape, [1], 0)})
        area = FromArea(0, len(content), 0, 0)
        sent = SentTensor(area, "float32", [len(content) // FLOAT_BYTES], [1], 0)
        try:
            call = Call(self.lease, number, 1, [sent, None], CallOptions(keys=[0]))
            frame = channel.ask(FrameKind.CALL, call, [content])
        except WireError:
            self._channels.pop(self.worker).close()
            raise
        return list(struct.unpack("4f", frame.body[:size])), frame.meta.times[1]

    def use(self, weights: SealedWeights, program: Program = ADD, x: float = 1.0) -> list[float]:
        """Acquire and call; repeat it where the lease had ended."""
        for _ in range(3):
            self.acquire(weights)
            try:
                return self.call(weights, program, x)
            except RemoteFailure as failure:
                if failure.failure != "lease not in force":
                    raise
        raise AssertionError("every lease ended before its first call")

    def release(self, request: str | None = None) -> None:
        self.control.notify(FrameKind.RELEASE, {"lease": self.lease, "request": request})

    def close(self) -> None:
        self.control.close()
        for channel in self._channels.values():
            channel.close()

    def _hello(self, role: str, **more: str) -> dict[str, Any]:
        fields = {"credential": self.credential, "session": self.session}
        return fields | {"pid": os.getpid(), "role": role} | more

    def _dial(self, worker: str) -> FrameSocket:
        return BlockingControl(self.address, self._hello("channel", worker=worker)).wire


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text(encoding="ascii")[:200]
    except (FileNotFoundError, ProcessLookupError):
        return False
