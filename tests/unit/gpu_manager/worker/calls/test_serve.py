"""A channel survives every request that is wrong, and closes on what is no request at all."""

import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.kit.worlds.caller import (
    LEASE,
    Caller,
    CallFailed,
    LocalWorker,
    program,
    step,
)
from torch_shim.errors import ConnectionLost
from torch_shim.wire.messages import Take
from torch_shim.wire.programs import Ref, digest_of
from torch_shim.wire.protocol import FrameKind, pack_frame

DOUBLE = program(step("o:mul", Ref(0), 2), output=[Ref(1)])
NO_OPTIONS: list[Any] = []
SOURCE = [2, 0, 16, 0, 0]


@pytest.fixture
def worker() -> Iterator[LocalWorker]:
    started = LocalWorker()
    before = _open_descriptors()
    yield started
    started.join()
    assert _open_descriptors() <= before  # garbage of other tests may have gone meanwhile


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counting


def tensor(
    source: Any = SOURCE,
    dtype: Any = "float32",
    shape: Any = (4,),
    strides: Any = (1,),
    offset: Any = 0,
) -> list[Any]:
    return [source, dtype, shape, strides, offset]


ABSURD_INPUTS = [
    tensor(source=[2, 0, 1 << 40, 0, 0]),
    tensor(source=[2, 1 << 62, 16, 0, 0]),
    tensor(source=[2, -16, 16, 0, 0]),
    tensor(source=[2, 0, -16, 0, 0]),
    tensor(source=[2, 0, 16.5, 0, 0]),
    tensor(source=[2, 0, 16, "a", 0]),
    tensor(source=[9, 0, 16, 0, 0]),
    tensor(source=[]),
    tensor(source=None),
    tensor(source=[[2], 0, 16, 0, 0]),
    tensor(shape=[5]),
    tensor(shape=[1 << 46], strides=[0]),
    tensor(shape=[1 << 30, 1 << 30], strides=[0, 0]),
    tensor(shape=[-1]),
    tensor(shape=[True]),
    tensor(shape="4"),
    tensor(shape=[1] * 65, strides=[1] * 65),
    tensor(strides=[-1]),
    tensor(strides=[2]),
    tensor(strides=[1, 1]),
    tensor(strides=[1 << 60]),
    tensor(offset=1),
    tensor(offset=-1),
    tensor(offset=1 << 62),
    tensor(offset=None),
    tensor(dtype="qint8"),
    tensor(dtype="nonsense"),
    tensor(dtype=7),
    [],
    [1, 2, 3],
    "text",
    b"bytes",
    {"a": 1},
]

ABSURD_REQUESTS: list[tuple[FrameKind, Any]] = [
    (FrameKind.CALL, [LEASE, 1, None, [tensor()]]),
    (FrameKind.CALL, [LEASE, 1, None, [], NO_OPTIONS]),
    (FrameKind.CALL, [LEASE, 1, None, None, NO_OPTIONS]),
    (FrameKind.CALL, [LEASE, [], None, [tensor()], NO_OPTIONS]),
    (FrameKind.CALL, [LEASE, 99, None, [tensor()], NO_OPTIONS]),
    (FrameKind.CALL, [LEASE, 1, 99, [None], NO_OPTIONS]),
    (FrameKind.CALL, [LEASE, 1, {}, [None], NO_OPTIONS]),
    (FrameKind.CALL, [[], 1, None, [tensor()], NO_OPTIONS]),
    (FrameKind.CALL, [LEASE, 1, None, [tensor()], ["int64", None, [], None]]),
    (FrameKind.CALL, [LEASE, 1, None, [tensor()], [["float16"], None, [], None]]),
    (FrameKind.CALL, [LEASE, 1, None, [tensor()], [7, None, [], None]]),
    (FrameKind.CALL, [LEASE, 1, None, [tensor()], [None, b"short", [], None]]),
    (FrameKind.CALL, [LEASE, 1, None, [tensor()], [None, "text", [], None]]),
    (FrameKind.CALL, [LEASE, 1, None, [tensor()], [None, None, ["a"], None]]),
    (FrameKind.CALL, [LEASE, 1, None, [tensor()], [None, None, [], "int8"]]),
    (FrameKind.CALL, None),
    (FrameKind.DEFINE, [2, "wrong digest"]),
    (FrameKind.DEFINE, ["a", "b"]),
    (FrameKind.DEFINE, []),
    (FrameKind.BIND, [1, 5, {9: tensor()}]),
    (FrameKind.BIND, [1, 5, {"a": tensor()}]),
    (FrameKind.BIND, [1, 5, {0: tensor()}]),
    (FrameKind.BIND, [1, 5, []]),
    (FrameKind.BIND, [1, "a", {}]),
    (FrameKind.BIND, [99, 5, {}]),
    (FrameKind.BIND, []),
    (FrameKind.DROP, ["a"]),
    (FrameKind.DROP, 5),
    (FrameKind.ARENA, [4096]),
    (FrameKind.ARENA, []),
]

BROKEN_PROGRAMS = [
    b"",
    b"\xc1",
    b"\x90",
    DOUBLE.pack()[:-3],
    program(step("m:numpy", Ref(0)), output=[Ref(1)]).pack(),
    program(step("o:mul", Ref(7), 2), output=[Ref(1)]).pack(),
    program(step("o:mul", Ref([1]), 2), output=[Ref(1)]).pack(),  # type: ignore[arg-type] # a wrong one
]

NONSENSE = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    bytes(64),
    pack_frame(FrameKind.CALL, [])[:4] + b"\xff" * 40,
    pack_frame(FrameKind.ORDER, ["StopWorker"]),
    pack_frame(FrameKind.ANSWER, []),
    pack_frame(FrameKind.CALL, [], descriptors=3),
]


def failure(caller: Caller, kind: FrameKind, meta: Any, body: Sequence[bytes] = ()) -> str:
    """What the worker calls what is wrong; after it the channel must answer as before."""
    try:
        caller.ask(kind, meta, body)
    except CallFailed as failed:
        found = failed.failure
    else:
        found = "nothing"
    assert caller.call(DOUBLE, torch.ones(4)).outputs[0].tolist() == [2.0] * 4
    return found


def test_channel_goes_on_when_an_input_is_absurd(worker: LocalWorker) -> None:
    with worker.connect() as caller:
        number = caller.define(DOUBLE)

        def found(described: Any) -> str:
            call = [LEASE, number, None, [described], NO_OPTIONS]
            return failure(caller, FrameKind.CALL, call, [bytes(16)])

        outcomes = {str(described): found(described) for described in ABSURD_INPUTS}
    assert {case for case, said in outcomes.items() if said != "bad frame"} == set()


def test_channel_goes_on_when_a_request_is_absurd(worker: LocalWorker) -> None:
    with worker.connect() as caller:
        assert caller.define(DOUBLE) == 1
        served = [
            (kind.name, meta)
            for kind, meta in ABSURD_REQUESTS
            if failure(caller, kind, meta, [bytes(16)] * (kind is FrameKind.CALL)) == "nothing"
        ]
    assert served == []
    assert torch.get_default_dtype() is torch.float32


def test_program_is_refused_when_it_cannot_be_built(worker: LocalWorker) -> None:
    with worker.connect() as caller:
        outcomes = [
            failure(caller, FrameKind.DEFINE, [1, digest_of(packed)], [packed])
            for packed in BROKEN_PROGRAMS
        ]
    assert outcomes == ["program refused"] * len(BROKEN_PROGRAMS)


def test_arena_is_refused_when_it_could_shrink_or_grow(worker: LocalWorker) -> None:
    for seals in (0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK):
        with worker.connect() as caller, pytest.raises(CallFailed) as failed:
            caller.arena(1 << 16, seals)
        assert failed.value.failure == "bad frame", seals


def test_arena_is_refused_when_its_size_is_another(worker: LocalWorker) -> None:
    descriptor = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    for size in (0, 4095, 8192, -1, 1 << 62, -5):
        with worker.connect() as caller, pytest.raises(CallFailed):
            caller.ask(FrameKind.ARENA, [size], descriptors=[descriptor])
    os.close(descriptor)


def test_arena_is_refused_when_it_is_a_file_or_a_socket(worker: LocalWorker) -> None:
    pair = socket.socketpair()
    with worker.connect() as caller, pair[0], pair[1], pytest.raises(CallFailed):
        caller.ask(FrameKind.ARENA, [4096], descriptors=[pair[0].fileno()])
    with worker.connect() as caller, open(__file__, "rb") as file, pytest.raises(CallFailed):  # noqa: PTH123 - its descriptor
        caller.ask(FrameKind.ARENA, [os.fstat(file.fileno()).st_size], descriptors=[file.fileno()])


def test_channel_goes_on_when_a_request_is_a_features_that_is_not_here(
    worker: LocalWorker,
) -> None:
    with worker.connect() as caller:
        nothing = os.open(os.devnull, os.O_RDONLY)
        with pytest.raises(CallFailed, match="TAKE"):
            caller.ask(FrameKind.TAKE, Take(1, "", 0, 8), descriptors=[nothing])
        os.close(nothing)
        assert caller.call(DOUBLE, torch.ones(4)).outputs[0].tolist() == [2.0] * 4


def test_channel_closes_when_a_frame_is_nonsense(worker: LocalWorker) -> None:
    for count, nonsense in enumerate(NONSENSE, 1):
        with worker.connect() as caller:
            caller.wire.socket.sendall(nonsense)
            with pytest.raises(ConnectionLost):
                caller.wire.receive()
        worker.join()
        assert len(worker.notes) == count, nonsense
        with worker.connect() as caller:
            assert caller.call(DOUBLE, torch.ones(4)).outputs[0].tolist() == [2.0] * 4


def test_channel_closes_quietly_when_a_frame_is_cut_short(worker: LocalWorker) -> None:
    with worker.connect() as caller:
        caller.wire.socket.sendall(pack_frame(FrameKind.CALL, [], body_bytes=1 << 30) + bytes(1000))
    worker.join()
    assert worker.notes == []


def test_descriptors_are_closed_when_nobody_asked_for_them(worker: LocalWorker) -> None:
    with worker.connect() as caller:
        nothing = os.open(os.devnull, os.O_RDONLY)
        with pytest.raises(CallFailed):
            caller.ask(FrameKind.DROP, "x", descriptors=[nothing] * 5)
        os.close(nothing)


def test_program_is_built_once_when_two_channels_define_it(worker: LocalWorker) -> None:
    built = []
    with worker.connect() as one, worker.connect() as other:
        for caller in (one, other):
            caller.define(DOUBLE)
            packed = DOUBLE.pack()
            built.append(worker.programs.get(digest_of(packed), memoryview(packed)))
    assert built[0] is built[1]


def test_call_sees_the_new_arena_when_it_was_replaced(worker: LocalWorker) -> None:
    with worker.connect(arena_bytes=1 << 12) as caller:
        assert caller.call(DOUBLE, torch.ones(4)).outputs[0].tolist() == [2.0] * 4
        caller.memory = caller.arena(1 << 13)
        assert caller.call(DOUBLE, torch.full((4,), 3.0)).outputs[0].tolist() == [6.0] * 4


def test_call_is_refused_when_it_names_another_sessions_lease(worker: LocalWorker) -> None:
    with worker.connect("neighbour") as neighbour, worker.connect("mine") as mine:
        assert mine.call(DOUBLE, torch.ones(4)).outputs[0].tolist() == [2.0] * 4
        with pytest.raises(CallFailed) as refused:
            neighbour.call(DOUBLE, torch.ones(4))
    worker.join()  # a call that ran is reported after its answer
    assert refused.value.failure == "lease not in force"
    assert worker.ran == [LEASE]


def test_lease_ends_when_its_call_has_been_answered(worker: LocalWorker) -> None:
    with worker.connect() as caller:
        caller.call(DOUBLE, torch.ones(4))
        worker.leases.enter(LEASE, "s", "f")
        worker.leases.end(LEASE)
        assert worker.ended == []
        with pytest.raises(CallFailed):
            caller.call(DOUBLE, torch.ones(4))
        worker.leases.leave(LEASE)
        assert worker.ended == [LEASE]
