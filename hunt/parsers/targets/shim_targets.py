"""The shim's protocol: frames, programs, calls, weights' tables, workers' reports and results."""

import socket
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import torch
from msgspec import msgpack

from gpu_manager.call_errors import CallRefused
from gpu_manager.credentials import FunctionCredentials, FunctionIdentity
from gpu_manager.errors import BadImage, GpuManagerError
from gpu_manager.frame_stream import FrameDecoder
from gpu_manager.server.requests import admit, read_request
from gpu_manager.weights.sealed_images import read_sizes
from gpu_manager.worker import orders
from gpu_manager.worker.calls.call import read_mode
from gpu_manager.worker.program.tensor_specs import read_spec
from hunt.parsers.parser_target import InputForm, Target
from torch_shim.data.put_and_get import DescribedValue, Describer
from torch_shim.errors import BadFrame
from torch_shim.remote.values import Results
from torch_shim.wire import programs
from torch_shim.wire.data_channel import DataChannel
from torch_shim.wire.image_digests import lay_out, pack_sizes
from torch_shim.wire.manager_session import WorkerPeer
from torch_shim.wire.messages import BEHIND, CallOptions, SentTensor
from torch_shim.wire.protocol import (
    MAX_BODY_BYTES,
    MAX_META_BYTES,
    Frame,
    FrameKind,
    decoded,
    encode,
    pack_frame,
    unpack_meta,
)

_SECRET = b"0123456789abcdef"
_FUNCTIONS = "functions, with any code"
_DIGEST = "0a" * 32


def targets() -> list[Target]:
    """All of this file."""
    return [
        _frames(), _hello(), _request(), _program(), _options(), _spec(), *_images(), _report(),
        _results(), _left(), _description(),
    ]  # fmt: skip


def _msgpack_target(
    name: str,
    parse: Callable[[bytes], Any],
    refusals: tuple[type[BaseException], ...],
    *seeds: Any,
    reads: tuple[str, ...],
    sender: str = _FUNCTIONS,
    bound: str = "that of its kind of frame",
) -> Target:
    """A reader of metadata that a frame had."""
    return Target(
        name, parse, refusals, lambda: [encode(seed) for seed in seeds], InputForm.MSGPACK,
        ("torch_shim/wire/protocol.py", *reads), sender, bound,
    )  # fmt: skip


def _frame(kind: FrameKind, data: bytes, body: bytes = b"") -> Frame:
    return Frame(kind, data, memoryview(bytearray(body)), ())


def _frames() -> Target:
    def decode(data: bytes) -> list[FrameKind]:
        decoder = FrameDecoder(MAX_META_BYTES, MAX_BODY_BYTES)
        half = len(data) // 2
        found = decoder.feed(memoryview(data)[:half]) + decoder.feed(memoryview(data)[half:])
        return [frame.kind for frame in found if frame.meta is not None]

    fields = {"role": "shim", "digest": _DIGEST, "sizes": b"\0" * 8, "total": 8}
    fields |= {"credential": "c", "session": "s"}
    seeds = [
        pack_frame(kind, [1, fields])
        for kind in (FrameKind.HELLO, FrameKind.OFFER, FrameKind.UPLOAD, FrameKind.ANSWER)
    ]
    tensor = [[2, 0, 16, 0, 0], "float32", [4], [1], 0]
    seeds.append(pack_frame(FrameKind.CALL, [7, 1, None, [tensor, None, 3], []]))
    recorded = [None, None, [], None, "", None, None, False, [1, 4096]]
    seeds.append(pack_frame(FrameKind.CALL, [7, 1, None, [tensor], recorded]))
    seeds.append(pack_frame(FrameKind.RUN_AGAIN, [1, 7]))
    seeds.append(pack_frame(FrameKind.CALL_AGAIN, [7, 1, [[5, 3]], [None, b"s", [9]]]))
    seeds.append(pack_frame(FrameKind.BIND, [1, 2, {3: tensor}]))
    seeds.append(pack_frame(FrameKind.CHUNK, [1, {}], 4) + b"body")
    return Target(
        "frames", decode, (BadFrame,), lambda: seeds, InputForm.FRAME,
        ("torch_shim/wire/protocol.py",
         "gpu_manager/frame_stream.py", "torch_shim/wire/protocol.py"),
        "functions, workers and managers",
        "by kind: metadata of 16 KiB to 64 MiB, read as the kind's type, bodies of 8 GiB at most, "
        "whose buffer grows as they arrive",
    )  # fmt: skip


def _hello() -> Target:
    credentials = FunctionCredentials(_SECRET)
    credential = credentials.issue(FunctionIdentity("openfaas-fn", "f"))
    hello = {"role": "channel", "credential": credential, "session": "s"}

    def parse(data: bytes) -> Any:
        _, fields = read_request(_frame(FrameKind.HELLO, data))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            return admit(fields, credentials, ours)

    return _msgpack_target(
        "hello", parse, (BadFrame, GpuManagerError),
        [1, hello | {"worker": "w"}], [1, hello | {"role": "admin"}],
        reads=("gpu_manager/server/requests.py", "gpu_manager/credentials.py",
               "common/gpu_wishes.py"),
        sender="whoever connects to a GPU manager", bound="16 KiB",
    )  # fmt: skip


def _request() -> Target:
    """Every kind of request, of the same metadata."""
    fields = {
        "digest": _DIGEST, "proof": "p", "sizes": b"\0" * 8, "total": 8, "offset": 0,
        "models": [_DIGEST], "batch": 3, "workers": ["a", "b"], "deadline_s": 1.5, "token": "t",
        "lease": 1, "last": True, "do": "pin", "handle": "h", "size": 1, "about": b"x",
    }  # fmt: skip

    def parse(data: bytes) -> list[Any]:
        read = []
        for kind in FrameKind:
            if kind < FrameKind.ANSWER:
                with suppress(BadFrame):
                    read.append(read_request(_frame(kind, data)))
        return read

    return _msgpack_target(
        "manager-request", parse, (BadFrame,), [1, fields],
        reads=("torch_shim/wire/messages.py",), bound="128 KiB",
    )  # fmt: skip


def _program() -> Target:
    constant = programs.Constant("float32", (2, 1), b"\0" * 8)
    values: list[Any] = [
        programs.Ref(0), programs.Named("dtype", "float32"), programs.DeviceName("cuda"),
        programs.Slice(None, 3, programs.Ref(1)), programs.Complex(1.0, -1.0), programs.Ellipse(),
        programs.Mapping(["a", 1]), programs.Tuple([None, True, "x", 2.5, [1, 2]]),
    ]  # fmt: skip
    step = programs.ProgramStep("t:torch.nn.functional.relu", values, {"inplace": False})
    part = programs.ProgramPart(1, (step,), programs.Ref(1))
    cond = programs.ProgramStep("h:cond", [programs.Ref(0), programs.PartName(0)])
    plain = programs.Program(
        2, (constant,), (step,), programs.Tuple([programs.Ref(3)]), random=True
    )
    parted = programs.Program(1, (), (cond,), programs.Ref(1), parts=(part,))
    return Target(
        "program", programs.unpack, (BadFrame,), lambda: [plain.pack(), parted.pack()],
        InputForm.MSGPACK, ("torch_shim/wire/programs.py",), _FUNCTIONS,
        "a body of 8 GiB; 16 MiB without the constants, 200,000 steps, arguments nested 32 deep",
        encode=lambda found: cast(programs.Program, found).pack(), memory_factor=600,
    )  # fmt: skip


def _options() -> Target:
    decoder = msgpack.Decoder(CallOptions)
    arithmetic = ["high", True, False, False, 1]
    stays = [1, 4096, {1: 64}, [7, 8]]
    return _msgpack_target(
        "call-options", lambda data: read_mode(decoded(decoder, data, "")), (BadFrame, CallRefused),
        ["float16", b"\0" * 16, [1, 2], "float32", "00-ab", arithmetic, stays, True],
        [None, None, [], None, "", None, None, False],
        reads=("torch_shim/wire/messages.py",),
        bound="4 MiB; in the tenant's own worker",
    )  # fmt: skip


def _spec() -> Target:
    decoder = msgpack.Decoder(SentTensor)

    def parse(data: bytes) -> Any:
        sent: SentTensor = decoded(decoder, data, "")
        return read_spec(sent.dtype, sent.shape, sent.strides, sent.offset)

    return _msgpack_target(
        "tensor", parse, (BadFrame, CallRefused),
        [[2, 0, 16, 0, 0], "float32", [2, 3], [3, 1], 4], [[1, 7, 0], "bool", [], [], 0],
        reads=("torch_shim/wire/messages.py",),
        bound="4 MiB; in the tenant's own worker",
    )  # fmt: skip


def _images() -> list[Target]:
    table = lay_out([5, 64, 0, 1 << 20])
    decoder = msgpack.Decoder(tuple[bytes, int])
    reads = ("torch_shim/wire/image_digests.py",)
    return [
        _msgpack_target(
            "image-sizes", lambda data: read_sizes(*decoded(decoder, data, "")),
            (BadFrame, BadImage), [pack_sizes(table), table.total_bytes],
            reads=reads, bound="65,536 storages",
        ),
    ]  # fmt: skip


def _report() -> Target:
    """What a worker says, which has read what functions sent."""
    return _msgpack_target(
        "worker-report", lambda data: orders.read(_frame(FrameKind.REPORT, data)), (BadFrame,),
        orders.CallsRan(1, 1, 3, 32, 0.125, 7, 7, 4, [0.5], ""),
        orders.CallsMerged(1, 2, 9, 6, {orders.Singly.OFF: 3}, {"d" * 64: orders.Singly.WRITES}),
        orders.DataPut(1, "s", "h", 8, b"about", 0.5),
        reads=("gpu_manager/worker/orders.py",), sender="workers, which tenants may rule",
        bound="64 KiB",
    )  # fmt: skip


def _results() -> Target:
    """A worker's answer to a call with two inputs; its fields, and a body behind them."""
    args = [torch.zeros(4), torch.ones(2, 3)]
    channel = cast(DataChannel, SimpleNamespace(arena=None))
    peer = cast(WorkerPeer, SimpleNamespace(lent=lambda _: None))

    def parse(data: bytes) -> Any:
        found = Results(_frame(FrameKind.RESULT, data, bytes(256)), channel, peer, args)
        for part in found.storages:
            if part.offset == BEHIND:
                found.bytes_at(BEHIND, part.size_bytes)
        return None

    storages = [[BEHIND, 16, True]]
    views = [[0, "float32", [4], [1], 0], [-1, "float32", [2], [2], 0]]
    times = [0.1, 0.2, 0.3, 0.4]
    return _msgpack_target(
        "call-result", parse, (BadFrame,),
        [storages, [*views, 3, None], [[1, BEHIND, 24]], b"\0" * 16, times],
        [storages, views[:1], [], None, times, 7],
        reads=("torch_shim/remote/values.py",), sender="workers, which may have gone mad",
        bound="4 MiB",
    )  # fmt: skip


def _left() -> Target:
    return _msgpack_target(
        "worker-left", lambda data: unpack_meta(FrameKind.LEFT, data), (BadFrame,),
        [[1, 0, 0, 64], [2, 3, 64, 128]],
        reads=("torch_shim/wire/messages.py",), sender="workers, which may have gone mad",
        bound="4 MiB",
    )  # fmt: skip


def _description() -> Target:
    """Data of another function: its description, and a leaf of every kind."""

    empty = torch.empty(0)

    def read(data: bytes) -> Any:
        return DescribedValue(data, 1 << 20).build(lambda *_: empty, lambda _: memoryview(b""))

    value = {"a": [torch.zeros(2, 3), b"xyz", None, 1.5, (True, "x")], 3: {"b": torch.ones(1)}}
    return Target(
        "data-description", read, (BadFrame,), lambda: [Describer(lambda _: None).describe(value)],
        InputForm.MSGPACK, ("torch_shim/data/put_and_get.py",), "functions of the same tenant",
        "64 KiB, nested 32 deep",
    )  # fmt: skip
