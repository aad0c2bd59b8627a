"""The orders between the manager, its fork server and its workers, and how these report.

Each travels as a list of its class's name and its fields. `model` is a number that the manager
gives each model of a worker, from 1; no number is given twice. A worker has read what a tenant
sent, so whatever comes back from one is read typed, and within bounds.
"""

import math
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, Union

from msgspec import Meta, Struct, msgpack, structs

from torch_shim.errors import BadFrame
from torch_shim.wire.protocol import Frame, FrameKind, decoded

# No number in an order is negative, and none is larger than any count of bytes (or not a number).
MAX_NUMBER = 1 << 62
_LARGEST = math.nextafter(MAX_NUMBER, 0.0)

Count = Annotated[int, Meta(ge=0, lt=MAX_NUMBER)]
Amount = Annotated[float, Meta(ge=0.0, le=_LARGEST)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class WorkerOrder(Struct, array_like=True, forbid_unknown_fields=True, tag=True):
    """An order or a report."""


class Warm(WorkerOrder):
    """Manager to worker: get ready for this device, before anybody knows for which model.

    An emulated GPU's context takes this time and memory.
    """

    device: str
    context_s: Amount
    context_bytes: Count


class Assign(WorkerOrder):
    """Manager to worker: you belong to a tenant now. `uid` is 0 where it stays as it is.

    It is carried out when the device is ready, and may follow LoadImage. The first two descriptors
    are those of the gates to and from the GPU, where there is a `link`: its bytes a second and
    those of its blocks. The next one is that of the GPU's turns: one for the whole GPU, or one for
    each of its `slots`.
    """

    uid: Count
    descriptors: Count
    processes: Count
    link: list[Amount]
    slots: Count


class Ready(WorkerOrder):
    """Worker to manager: assigned. What could not be given up, and what the process costs."""

    missing: list[str]
    overhead_bytes: Count


class LoadImage(WorkerOrder):
    """Manager to worker, with the image's descriptor: hold this image."""

    model: Count
    digest: str
    table: list[list[Count]]
    total_bytes: Count
    limit_bytes: Count
    load_s: Amount  # an emulated load takes this much at least
    run_s: Amount  # an emulated run, likewise
    # The next descriptor is that of a pipe that tells how much of the image is there
    # (`devices/image_file.py`).
    arriving: bool
    shared: bool  # the model is one of several in this worker
    gpu_share: Amount  # of the GPU's multiprocessors: its calls use no more
    merged: Count  # this many calls at most run as one; 0: the usual limit
    together_bytes: Count  # all models may use this much at once; 0: the model is alone
    ahead: bool  # no request waits for it


class HurryLoad(WorkerOrder):
    """Manager to worker: a request waits for this model, which is being loaded ahead."""

    model: Count


class ImageLoaded(WorkerOrder):
    """Worker to manager: the image is in place, and verified.

    Beginning and end of making the context, and of the transfer, by the system's monotonic clock.
    """

    model: Count
    load_s: Amount
    memory_bytes: Count
    context: list[Amount]
    transfer: list[Amount]


class ImageLoadFailed(WorkerOrder):
    """Worker to manager: the image could not be put in place; no image can where `model` is 0."""

    model: Count
    out_of_memory: bool
    detail: str


class SetLimit(WorkerOrder):
    """Manager to worker: what you may use. `answers` numbers the pressure it answers, or is 0.

    `together_bytes` is what all models of the worker may use at once, or 0 where there is one.
    """

    model: Count
    limit_bytes: Count
    together_bytes: Count
    answers: Count
    retry: bool


class LeaseTerms(NamedTuple):
    """The slots by number, of so many that the GPU has; none where the lease has the whole GPU.

    No more than `batch` calls run as one, and they compute with `vcpus` threads of the host at
    most; 0 says nothing.
    """

    slots: tuple[Count, ...] = ()
    of: Count = 1
    batch: Count = 0
    vcpus: Count = 0

    @property
    def share(self) -> float:
        return len(self.slots) / self.of if self.slots else 1.0


USUAL_TERMS = LeaseTerms()


class Admission(NamedTuple):
    """Calls of this session under this lease may run, on its terms.

    If the owner is a function, those of its session whose call comes first, or of `several`. Of a
    lease that is `divided` each session has a part of its own, and is admitted by itself.
    """

    lease: Count
    owner: str
    several: bool = False
    divided: bool = False
    terms: LeaseTerms = USUAL_TERMS


class AdmitCalls(WorkerOrder):
    """Manager to worker: let these calls in."""

    model: Count
    admission: Admission


class CallsClaimed(WorkerOrder):
    """Worker to manager: this session was the first to call under a function's lease."""

    model: Count
    lease: Count
    session: str


class EndCalls(WorkerOrder):
    """Manager to worker: no further call under this lease; say Ended when none is in flight.

    The end of a lease of a model that is not there is said at once.
    """

    model: Count
    lease: Count


class CallsEnded(WorkerOrder):
    """Worker to manager: the lease's last call has been answered.

    `computed_s` is as in CallsComputed.
    """

    model: Count
    lease: Count
    computed_s: Amount


class AskComputed(WorkerOrder):
    """Manager to worker: say for how long calls have run under this lease."""

    model: Count
    lease: Count


class CallsComputed(WorkerOrder):
    """Worker to manager: under this lease calls of any model ran for so long since this was said.

    Those that still run are included; those that run at once count once.
    """

    model: Count
    lease: Count
    computed_s: Amount


class OpenChannel(WorkerOrder):
    """Manager to worker, with a socket: serve the calls that come over it."""

    model: Count
    session: str
    function: str


class StopWorker(WorkerOrder):
    """Manager to worker: send the functions what only you have, and end."""


class DropModel(WorkerOrder):
    """Manager to worker: send the functions what only you have, and let the model go, but stay."""

    model: Count


class ModelDropped(WorkerOrder):
    """Worker to manager: nothing is left of the model; the GPU memory that the process has now."""

    model: Count
    memory_bytes: Count


class CallsRan(WorkerOrder):
    """Worker to manager: calls ended well since the last of these; the times are per call.

    `batch` is the first dimension of their largest input, 0 if there is none; `held_bytes` what the
    model has between calls, 0 where memory of calls stays with it. They ran in groups of `together`
    as one; the time of each is its part of the group's. `metrics` are what the model uses of its
    GPU (`usage.py`), where that is news, else empty. `session` is whose they were, if their lease
    is divided.
    """

    model: Count
    lease: Count
    calls: Count
    batch: Count
    run_s: Amount
    peak_bytes: Count
    held_bytes: Count
    together: Count
    metrics: list[Amount]
    session: str


class Singly(StrEnum):
    """Why a call ran singly although others like it might have waited."""

    OFF = "off"
    RANDOM = "random"
    PARTS = "control_flow"
    NESTED = "own_vmap"
    EXACT = "deterministic"
    REPEATED = "repeated"
    NOTHING_SENT = "nothing_sent"
    UNKNOWN = "not_seen_before"
    WRITES = "writes"
    ALIASES = "shared_outputs"
    VALUES = "depends_on_values"
    NO_RULE = "no_batching_rule"
    DIFFERS = "differs"
    SHAPES = "other_shapes"
    SLOWER = "slower"
    MEMORY = "memory"
    FAILED = "failed_merged"
    LEFT_OVER = "left_over"
    TOO_MANY = "too_many_programs"


class CallsMerged(WorkerOrder):
    """Worker to manager: of calls that waited together, since the last of these.

    The groups that ran as one and their calls, those that ran both ways to be compared, and those
    that ran `singly`, by the reason. What is `never` merged from now on are programs, by digest.
    """

    model: Count
    groups: Count
    calls: Count
    compared: Count
    singly: dict[Singly, Count]
    never: dict[Digest, Singly]


class BytesMoved(WorkerOrder):
    """Worker to manager: what went to the GPU and from it since the last of these.

    For each rank of transfers the bytes, and the seconds for which they waited.
    """

    to_gpu: list[list[Amount]]
    to_host: list[list[Amount]]


class Pressure(WorkerOrder):
    """Worker to manager: a call needs this many bytes in all and waits for a Limit."""

    model: Count
    number: Count
    lease: Count
    need_bytes: Count


class Note(WorkerOrder):
    """Worker to manager: something for the log, and the `traceparent` that it is about, or none."""

    text: str
    trace: str


class Fork(WorkerOrder):
    """Manager to fork server, with the worker's end of its orders: make a worker."""

    number: Count


class Forked(WorkerOrder):
    """Fork server to manager, with a pidfd: the worker exists. It may have ended since."""

    number: Count
    pid: Count


class DataOrder(WorkerOrder):
    """One about data that functions put."""


class HandOver(DataOrder):
    """Manager to worker, with a descriptor of memory: copy the data that you have there.

    Functions put it by this handle.
    """

    model: Count
    handle: str
    size_bytes: Count


class HandedOver(DataOrder):
    """Worker to manager: the data was copied; or it could not be, since it is not here."""

    model: Count
    handle: str
    done: bool


class WithdrawData(DataOrder):
    """Manager to worker: no call takes the data of this handle any more."""

    model: Count
    handle: str


class LendData(DataOrder):
    """Manager to worker: let another process open the data of this handle, until it is given back.

    Each of these is answered once, and counts as one use.
    """

    model: Count
    handle: str


class DataLent(DataOrder):
    """Worker to manager, with a descriptor unless there is a token: how the data is opened.

    It begins at `offset`, and another process finds what is there by the driver's `token`. It may
    not be here, or not on the device: then it is not `done`.
    """

    model: Count
    handle: str
    done: bool
    size_bytes: Count
    offset: Count
    token: bytes


class BorrowData(DataOrder):
    """Worker to manager: a function wants to use data by this handle, which is not here."""

    model: Count
    handle: str


class DataBorrowed(DataOrder):
    """Manager to worker: the answer, as DataLent has it; not `done` if the data cannot be lent.

    `about` is for its reader. Data on the `same_gpu` may be used where it is.
    """

    model: Count
    handle: str
    done: bool
    size_bytes: Count
    offset: Count
    token: bytes
    about: bytes
    same_gpu: bool


class DataGivenBack(DataOrder):
    """Borrower to manager, and manager to lender: borrowed data is used once less."""

    model: Count
    handle: str


class GrantData(DataOrder):
    """Manager to worker: so much more of this model may be put without asking, set aside for it.

    A handle is a secret, of so many random bytes, with something `before` and `behind` it.
    """

    model: Count
    before: str
    secret_bytes: Count
    behind: str
    size_bytes: Count
    pieces: Count


class RecallGrant(DataOrder):
    """Manager to worker: nothing more is put without asking; say what is left of the grants."""

    model: Count


class GrantLeft(DataOrder):
    """Worker to manager: the answer to RecallGrant, behind everything that was put before."""

    model: Count
    size_bytes: Count
    pieces: Count


class DataPut(DataOrder):
    """Worker to manager: a session has put data, for so many seconds."""

    model: Count
    session: str
    handle: str
    size_bytes: Count
    about: bytes
    lifetime_s: Amount | None  # None: the usual one


def bounded(report: WorkerOrder) -> WorkerOrder:
    """A report whose numbers a program may have made too large: those are the largest there are."""
    return type(report)(*map(_bounded, structs.astuple(report)))


def read(frame: Frame) -> WorkerOrder:
    """The order that a frame carries; BadFrame unless every field is of its type."""
    if frame.kind not in (FrameKind.ORDER, FrameKind.REPORT):
        raise BadFrame(f"{frame.kind.name} is no order")
    order: WorkerOrder = decoded(_DECODER, frame.packed, frame.kind.name)
    return order


def _bounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_bounded(each) for each in value]
    if type(value) is float:
        return min(value, _LARGEST) if value > 0 else 0.0  # which is what NaN becomes as well
    return max(0, min(value, MAX_NUMBER - 1)) if type(value) is int else value


def _leaves(kind: type[WorkerOrder]) -> list[type[WorkerOrder]]:
    """All orders of a kind."""
    kinds = kind.__subclasses__()
    return [leaf for each in kinds for leaf in _leaves(each)] if kinds else [kind]


_DECODER = msgpack.Decoder(Union[tuple(_leaves(WorkerOrder))])  # noqa: UP007 - of a list
