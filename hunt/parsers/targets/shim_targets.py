"""The shim's protocol: frames, programs, calls, weights' tables, workers' reports and results."""

import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import torch

from gpu_manager.call_errors import CallRefused
from gpu_manager.credentials import FunctionCredentials, FunctionIdentity
from gpu_manager.errors import BadImage, GpuManagerError
from gpu_manager.frame_stream import FrameDecoder
from gpu_manager.server.requests import admit
from gpu_manager.sessions import request_fields
from gpu_manager.weights.sealed_images import read_sizes
from gpu_manager.worker import orders
from gpu_manager.worker.calls.call import read_options
from gpu_manager.worker.program.tensor_specs import read_spec
from hunt.parsers.parser_target import InputForm, Target
from torch_shim.data.value_layout import DescribedValue, Describer
from torch_shim.errors import BadFrame
from torch_shim.remote.results import BEHIND, Results
from torch_shim.wire import programs
from torch_shim.wire.frame_socket import Frame
from torch_shim.wire.image_digests import lay_out, pack_sizes
from torch_shim.wire.protocol import MAX_BODY_BYTES, MAX_META_BYTES, FrameKind, pack_frame
from torch_shim.wire.worker_peer import DataChannel, WorkerPeer, read_left

_SECRET = b"0123456789abcdef"
_FUNCTIONS = "functions, with any code"
_DIGEST = "0a" * 32
# As in `stream_targets`: address space for nested lists of the longest header that is taken.
_NESTED_LISTS = 1024
_LONGEST_LIST = 1 << 16


def targets() -> list[Target]:
    """All of this file."""
    return [
        _frames(), _hello(), _request(), _program(), _options(), _spec(), *_images(), _report(),
        _results(), _left(), _description(),
    ]  # fmt: skip


def _msgpack_target(
    name: str,
    parse: Callable[[Any], Any],
    refusals: tuple[type[BaseException], ...],
    *seeds: Any,
    reads: tuple[str, ...],
    sender: str = _FUNCTIONS,
    bound: str = "that of its kind of frame",
) -> Target:
    """A reader of metadata that a frame had; what is no msgpack does not come to it."""

    def read(data: bytes) -> Any:
        try:
            meta = msgpack.unpackb(data, max_ext_len=0)
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
            return None
        return parse(meta)

    return Target(
        name, read, refusals, lambda: [msgpack.packb(each) for each in seeds], InputForm.MSGPACK,
        reads, sender, bound, memory_bytes=8 * _LONGEST_LIST * _NESTED_LISTS,
    )  # fmt: skip


def _frames() -> Target:
    def decode(data: bytes) -> list[FrameKind]:
        decoder = FrameDecoder(MAX_META_BYTES, MAX_BODY_BYTES)
        half = len(data) // 2
        found = decoder.feed(memoryview(data)[:half]) + decoder.feed(memoryview(data)[half:])
        return [frame.kind for frame in found]

    fields = {"version": 1, "role": "shim", "digests": [_DIGEST], "sizes": b"\0" * 8}
    seeds = [
        pack_frame(kind, [1, fields])
        for kind in (FrameKind.HELLO, FrameKind.OFFER, FrameKind.CALL, FrameKind.RAN)
    ]
    seeds.append(pack_frame(FrameKind.BIND, [1, 2, {3: None}]))
    seeds.append(pack_frame(FrameKind.CHUNK, [1, {}], 4) + b"body")
    return Target(
        "frames", decode, (BadFrame,), lambda: seeds, InputForm.FRAME,
        ("torch_shim/wire/protocol.py", "torch_shim/wire/bounded_msgpack.py",
         "gpu_manager/frame_stream.py", "torch_shim/wire/frame_socket.py"),
        "functions, workers and managers",
        "by kind: metadata of 16 KiB to 64 MiB, entries and longest list, bodies of 8 GiB at most, "
        "whose buffer grows as they arrive",
        memory_bytes=8 * _LONGEST_LIST * _NESTED_LISTS,
    )  # fmt: skip


def _hello() -> Target:
    credentials = FunctionCredentials(_SECRET)
    credential = credentials.issue(FunctionIdentity("openfaas-fn", "f"))
    hello = {"version": 1, "role": "channel", "credential": credential, "session": "s"}

    def parse(meta: Any) -> Any:
        _, fields = request_fields.request(meta)
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
    """Every reader of a request's fields, on every request."""
    readers: dict[str, Callable[[request_fields.Fields, str], Any]] = {
        "token": request_fields.token_or_none, "name": request_fields.text_or_none,
        "digests": request_fields.digests, "names": request_fields.texts,
        "digest": request_fields.digest, "count": request_fields.whole_or_none,
        "wait_s": request_fields.seconds_or_none, "flag": request_fields.flag,
    }  # fmt: skip
    fields = {
        "token": "t", "name": "n", "digests": [_DIGEST], "names": ["a", "b"], "digest": _DIGEST,
        "count": 3, "wait_s": 1.5, "flag": True,
    }  # fmt: skip

    def parse(meta: Any) -> list[Any]:
        _, found = request_fields.request(meta)
        return [read(found, name) for name, read in readers.items()]

    return _msgpack_target(
        "manager-request", parse, (BadFrame,), [1, fields],
        reads=("gpu_manager/sessions/request_fields.py",), bound="128 KiB, 4,096 entries",
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
        "a body of 8 GiB; 200,000 steps, 6.4 million entries, arguments nested 32 deep",
        encode=lambda found: cast(programs.Program, found).pack(),
        memory_bytes=8 * _LONGEST_LIST * _NESTED_LISTS, memory_factor=600,
    )  # fmt: skip


def _options() -> Target:
    arithmetic = ["high", True, False, False, 1]
    stays = [1, 4096, [[1, 64]], [7, 8]]
    return _msgpack_target(
        "call-options", read_options, (CallRefused,),
        [["float16", True], b"\0" * 16, [1, 2], "float32", "00-ab", arithmetic, stays, True],
        [None, None, [], None, "", None, None, False],
        reads=("gpu_manager/worker/calls/call.py", "torch_shim/wire/arithmetic.py"),
        bound="16 MiB, 1 million entries; in the tenant's own worker",
    )  # fmt: skip


def _spec() -> Target:
    def parse(meta: Any) -> Any:
        return read_spec(*meta) if isinstance(meta, list) and len(meta) == 4 else None

    return _msgpack_target(
        "tensor", parse, (CallRefused,), ["float32", [2, 3], [3, 1], 4],
        ["bool", [], [], 0],
        reads=("gpu_manager/worker/program/tensor_specs.py",),
        bound="16 MiB, 1 million entries; in the tenant's own worker",
    )  # fmt: skip


def _images() -> list[Target]:
    table = lay_out([5, 64, 0, 1 << 20])

    def sizes(meta: Any) -> Any:
        return read_sizes(*meta) if isinstance(meta, list) and len(meta) == 2 else None

    reads = ("gpu_manager/weights/sealed_images.py", "torch_shim/wire/image_digests.py")
    return [
        _msgpack_target(
            "image-sizes", sizes, (BadImage,), [pack_sizes(table), table.total_bytes],
            reads=reads, bound="65,536 storages",
        ),
    ]  # fmt: skip


def _report() -> Target:
    """What a worker says, which has read what functions sent: [kind, fields]."""

    def parse(meta: Any) -> Any:
        match meta:
            case [int(number), fields] if number in FrameKind.__members__.values():
                return orders.read(FrameKind(number), fields)
            case _:
                return None

    seeds = [
        [int(kind), [_sample(each) for each in order.__annotations__.values()]]
        for order, kind in orders.KINDS.items()
        if kind >= FrameKind.READY
    ]
    return _msgpack_target(
        "worker-report", parse, (BadFrame,), *seeds,
        reads=("gpu_manager/worker/orders.py",), sender="workers, which tenants may rule",
        bound="64 KiB, 1,024 entries",
    )  # fmt: skip


def _sample(kind: Any) -> Any:
    return {int: 1, float: 0.5, str: "a", bool: True, bytes: b"x"}.get(kind, [])


def _results() -> Target:
    """A worker's answer to a call with two inputs; its fields, and a body behind them."""
    args = [torch.zeros(4), torch.ones(2, 3)]
    channel = cast(DataChannel, SimpleNamespace(arena=None))
    peer = cast(WorkerPeer, SimpleNamespace(lent=lambda _: None))

    def parse(meta: Any) -> Any:
        frame = Frame(FrameKind.RESULT, meta, memoryview(bytearray(256)), ())
        found = Results(frame, channel, peer, args)
        for entry in found.storages:
            if entry[0] == BEHIND:
                found.bytes_at(BEHIND, entry[1])
        return None

    storages, views = [[BEHIND, 16, 1]], [[0, "float32", [4], [1], 0], [-1, "float32", [2], [2], 0]]
    return _msgpack_target(
        "call-result", parse, (BadFrame,),
        [storages, [*views, 3, None], [[1, BEHIND, 24]], b"\0" * 16, [0.1, 0.2]],
        [storages, views[:1], [], None, []],
        reads=("torch_shim/remote/results.py",), sender="workers, which may have gone mad",
        bound="16 MiB, 1 million entries",
    )  # fmt: skip


def _left() -> Target:
    return _msgpack_target(
        "worker-left", lambda meta: list(read_left(meta, 1 << 20)), (BadFrame,),
        [[1, 0, 0, 64], [2, 3, 64, 128]],
        reads=("torch_shim/wire/worker_peer.py",), sender="workers, which may have gone mad",
        bound="16 MiB, 1 million entries",
    )  # fmt: skip


def _description() -> Target:
    """Data of another function: its description, and a leaf of every kind."""

    empty = torch.empty(0)

    def read(data: bytes) -> Any:
        return DescribedValue(data, 1 << 20).build(lambda *_: empty, lambda _: memoryview(b""))

    value = {"a": [torch.zeros(2, 3), b"xyz", None, 1.5, (True, "x")], 3: {"b": torch.ones(1)}}
    return Target(
        "data-description", read, (BadFrame,), lambda: [Describer(lambda _: None).describe(value)],
        InputForm.MSGPACK, ("torch_shim/data/value_layout.py",), "functions of the same tenant",
        "64 KiB, 16,384 entries, nested 32 deep",
        memory_bytes=8 * (1 << 13) * _NESTED_LISTS,
    )  # fmt: skip
