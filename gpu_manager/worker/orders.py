"""The fields of the orders between the manager, its fork server and its workers.

Each order is a named tuple whose fields travel as a list under the kind in `KINDS`. `model` is a
number that the manager gives each model of a worker, from 1; no number is given twice. A worker has
read what a tenant sent, so the manager checks the types of whatever comes back from one.
"""

import math
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from torch_shim.errors import BadFrame
from torch_shim.wire.bounded_msgpack import shown
from torch_shim.wire.protocol import FrameKind

# No number in an order is negative, and none is larger than any count of bytes (or not a number).
MAX_NUMBER = 1 << 62
_LARGEST = math.nextafter(MAX_NUMBER, 0.0)


class Warm(NamedTuple):
    """Manager to worker: get ready for this device, before anybody knows for which model.

    An emulated GPU's context takes this time and memory.
    """

    device: str
    context_s: float
    context_bytes: int


class Assign(NamedTuple):
    """Manager to worker: you belong to a tenant now. `uid` is 0 where it stays as it is.

    It is carried out when the device is ready, and may follow LoadImage. The first two descriptors
    are those of the gates to and from the GPU (`transfers/process_gate.py`), where there is a
    `link`: its bytes a second and those of its blocks. The next one is that of the GPU's turns:
    one for the whole GPU, or one for each of its `slots`.
    """

    uid: int
    descriptors: int
    processes: int
    link: list[float]
    slots: int


class Ready(NamedTuple):
    """Worker to manager: assigned. What could not be given up, and what the process costs."""

    missing: list[str]
    overhead_bytes: int


class LoadImage(NamedTuple):
    """Manager to worker, with the image's descriptor: hold this image."""

    model: int
    digest: str
    table: list[list[int]]
    total_bytes: int
    limit_bytes: int
    load_s: float  # an emulated load takes this much at least
    run_s: float  # an emulated run, likewise
    # The next descriptor is that of a pipe that tells how much of the image is there
    # (`devices/image_file.py`).
    arriving: bool
    shared: bool  # the model is one of several in this worker
    gpu_share: float  # of the GPU's multiprocessors: its calls use no more
    merged: int  # this many calls at most run as one; 0: the usual limit
    together_bytes: int  # all models may use this much at once; 0: the model is alone
    ahead: bool  # no request waits for it


class HurryLoad(NamedTuple):
    """Manager to worker: a request waits for this model, which is being loaded ahead."""

    model: int


class ImageLoaded(NamedTuple):
    """Worker to manager: the image is in place, and verified.

    Beginning and end of making the context, and of the transfer, by the system's monotonic clock.
    """

    model: int
    load_s: float
    memory_bytes: int
    context: list[float]
    transfer: list[float]


class ImageLoadFailed(NamedTuple):
    """Worker to manager: the image could not be put in place; no image can where `model` is 0."""

    model: int
    out_of_memory: bool
    detail: str


class SetLimit(NamedTuple):
    """Manager to worker: what you may use. `answers` numbers the pressure it answers, or is 0.

    `together_bytes` is what all models of the worker may use at once, or 0 where there is one.
    """

    model: int
    limit_bytes: int
    together_bytes: int
    answers: int
    retry: bool


class AdmitCalls(NamedTuple):
    """Manager to worker: calls of this session under this lease may run.

    If the owner is a function, those of its session whose call comes first, or of `several`. Of a
    lease that is `divided` each session has a part of its own, and is admitted by itself. The rest
    is as in `LeaseTerms`.
    """

    model: int
    lease: int
    owner: str
    several: bool
    divided: bool
    slots: list[int]
    of: int
    batch: int
    vcpus: int


class CallsClaimed(NamedTuple):
    """Worker to manager: this session was the first to call under a function's lease."""

    model: int
    lease: int
    session: str


class EndCalls(NamedTuple):
    """Manager to worker: no further call under this lease; say Ended when none is in flight.

    The end of a lease of a model that is not there is said at once.
    """

    model: int
    lease: int


class CallsEnded(NamedTuple):
    """Worker to manager: the lease's last call has been answered.

    `computed_s` is as in CallsComputed.
    """

    model: int
    lease: int
    computed_s: float


class AskComputed(NamedTuple):
    """Manager to worker: say for how long calls have run under this lease."""

    model: int
    lease: int


class CallsComputed(NamedTuple):
    """Worker to manager: under this lease calls of any model ran for so long since this was said.

    Those that still run are included; those that run at once count once.
    """

    model: int
    lease: int
    computed_s: float


class OpenChannel(NamedTuple):
    """Manager to worker, with a socket: serve the calls that come over it."""

    model: int
    session: str
    function: str


class StopWorker(NamedTuple):
    """Manager to worker: send the functions what only you have, and end."""


class DropModel(NamedTuple):
    """Manager to worker: send the functions what only you have, and let the model go, but stay."""

    model: int


class ModelDropped(NamedTuple):
    """Worker to manager: nothing is left of the model; the GPU memory that the process has now."""

    model: int
    memory_bytes: int


class CallsRan(NamedTuple):
    """Worker to manager: calls ended well since the last of these; the times are per call.

    `held_bytes` is what the model has between calls, 0 where memory of calls stays with it. They
    ran in groups of `together` as one; the time of each is its part of the group's. `metrics` are
    what the model uses of its GPU (`usage.py`), where that is news, else empty.
    `session` is whose they were, if their lease is divided.
    """

    model: int
    lease: int
    calls: int
    batch: int
    run_s: float
    peak_bytes: int
    held_bytes: int
    together: int
    metrics: list[float]
    session: str


class CallsMerged(NamedTuple):
    """Worker to manager: of calls that waited together, since the last of these.

    The groups that ran as one and their calls, those that ran both ways to be compared, and those
    that ran singly, with the reasons and how often each held. What is `never` merged from now on
    are digests of programs, each with the reason behind it.
    """

    model: int
    groups: int
    calls: int
    compared: int
    reasons: list[str]
    singly: list[int]
    never: list[str]


class BytesMoved(NamedTuple):
    """Worker to manager: what went to the GPU and from it since the last of these.

    For each rank of transfers the bytes, and the seconds for which they waited.
    """

    to_gpu: list[list[float]]
    to_host: list[list[float]]


class Pressure(NamedTuple):
    """Worker to manager: a call needs this many bytes in all and waits for a Limit."""

    model: int
    number: int
    lease: int
    need_bytes: int


class Note(NamedTuple):
    """Worker to manager: something for the log, and the `traceparent` that it is about, or none."""

    text: str
    trace: str


class Fork(NamedTuple):
    """Manager to fork server, with the worker's end of its orders: make a worker."""

    number: int


class Forked(NamedTuple):
    """Fork server to manager, with a pidfd: the worker exists. It may have ended since."""

    number: int
    pid: int


class HandOver(NamedTuple):
    """Manager to worker, with a descriptor of memory: copy the data that you have there.

    Functions put it by this handle.
    """

    model: int
    handle: str
    size_bytes: int


class HandedOver(NamedTuple):
    """Worker to manager: the data was copied; or it could not be, since it is not here."""

    model: int
    handle: str
    done: bool


class WithdrawData(NamedTuple):
    """Manager to worker: no call takes the data of this handle any more."""

    model: int
    handle: str


class LendData(NamedTuple):
    """Manager to worker: let another process open the data of this handle, until it is given back.

    Each of these is answered once, and counts as one use.
    """

    model: int
    handle: str


class DataLent(NamedTuple):
    """Worker to manager, with a descriptor unless there is a token: how the data is opened.

    It begins at `offset`, and another process finds what is there by the driver's `token`. It may
    not be here, or not on the device: then it is not `done`.
    """

    model: int
    handle: str
    done: bool
    size_bytes: int
    offset: int
    token: bytes


class BorrowData(NamedTuple):
    """Worker to manager: a function wants to use data by this handle, which is not here."""

    model: int
    handle: str


class DataBorrowed(NamedTuple):
    """Manager to worker: the answer, as DataLent has it; not `done` if the data cannot be lent.

    `about` is for its reader. Data on the `same_gpu` may be used where it is.
    """

    model: int
    handle: str
    done: bool
    size_bytes: int
    offset: int
    token: bytes
    about: bytes
    same_gpu: bool


class DataGivenBack(NamedTuple):
    """Borrower to manager, and manager to lender: borrowed data is used once less."""

    model: int
    handle: str


class GrantData(NamedTuple):
    """Manager to worker: so much more of this model may be put without asking, set aside for it.

    A handle is a secret, of so many random bytes, with something `before` and `behind` it.
    """

    model: int
    before: str
    secret_bytes: int
    behind: str
    size_bytes: int
    pieces: int


class RecallGrant(NamedTuple):
    """Manager to worker: nothing more is put without asking; say what is left of the grants."""

    model: int


class GrantLeft(NamedTuple):
    """Worker to manager: the answer to RecallGrant, behind everything that was put before."""

    model: int
    size_bytes: int
    pieces: int


class DataPut(NamedTuple):
    """Worker to manager: a session has put data, for so many seconds, or for the usual time."""

    model: int
    session: str
    handle: str
    size_bytes: int
    about: bytes
    lifetime_s: list[float]


DataOrder = (
    HandOver
    | HandedOver
    | WithdrawData
    | LendData
    | DataLent
    | BorrowData
    | DataBorrowed
    | DataGivenBack
    | GrantData
    | RecallGrant
    | GrantLeft
    | DataPut
)


WorkerOrder = (
    Warm
    | Assign
    | Ready
    | LoadImage
    | ImageLoaded
    | ImageLoadFailed
    | SetLimit
    | AdmitCalls
    | CallsClaimed
    | EndCalls
    | CallsEnded
    | OpenChannel
    | StopWorker
    | CallsRan
) | (
    Pressure
    | Note
    | Fork
    | Forked
    | DropModel
    | ModelDropped
    | HurryLoad
    | BytesMoved
    | CallsMerged
    | AskComputed
    | CallsComputed
    | DataOrder
)

KINDS: dict[type[WorkerOrder], FrameKind] = {
    Warm: FrameKind.WARM,
    Assign: FrameKind.ASSIGN,
    Ready: FrameKind.READY,
    LoadImage: FrameKind.LOAD,
    ImageLoaded: FrameKind.LOADED,
    ImageLoadFailed: FrameKind.LOAD_FAILED,
    SetLimit: FrameKind.LIMIT,
    AdmitCalls: FrameKind.ADMIT,
    CallsClaimed: FrameKind.CLAIMED,
    EndCalls: FrameKind.END,
    CallsEnded: FrameKind.ENDED,
    AskComputed: FrameKind.ASK_COMPUTED,
    CallsComputed: FrameKind.COMPUTED,
    OpenChannel: FrameKind.CHANNEL,
    StopWorker: FrameKind.STOP,
    DropModel: FrameKind.EMPTY,
    ModelDropped: FrameKind.CLEARED,
    HandOver: FrameKind.HAND_OVER,
    HandedOver: FrameKind.HANDED_OVER,
    WithdrawData: FrameKind.WITHDRAW,
    LendData: FrameKind.LEND,
    DataLent: FrameKind.LENT,
    BorrowData: FrameKind.BORROW,
    DataBorrowed: FrameKind.BORROWED,
    DataGivenBack: FrameKind.GIVEN_BACK,
    GrantData: FrameKind.GRANT,
    RecallGrant: FrameKind.RECALL,
    GrantLeft: FrameKind.GRANT_LEFT,
    DataPut: FrameKind.PUT_HERE,
    HurryLoad: FrameKind.HURRY,
    BytesMoved: FrameKind.MOVED,
    CallsRan: FrameKind.RAN,
    CallsMerged: FrameKind.MERGED,
    Pressure: FrameKind.PRESSURE,
    Note: FrameKind.FAILED,
    Fork: FrameKind.FORK,
    Forked: FrameKind.FORKED,
}
_TYPES = {kind: order for order, kind in KINDS.items()}
_FIELDS: dict[type[WorkerOrder], list[Any]] = {
    order: list(get_type_hints(order).values()) for order in KINDS
}

AnyOrder = TypeVar("AnyOrder", bound=WorkerOrder)


class LeaseTerms(NamedTuple):
    """The slots by number, of so many that the GPU has; none where the lease has the whole GPU.

    No more than `batch` calls run as one, and they compute with `vcpus` threads of the host at
    most; 0 says nothing.
    """

    slots: tuple[int, ...] = ()
    of: int = 1
    batch: int = 0
    vcpus: int = 0

    @property
    def share(self) -> float:
        return len(self.slots) / self.of if self.slots else 1.0


USUAL_TERMS = LeaseTerms()


def admitting(
    model: int,
    lease: int,
    owner: str,
    several_divided: tuple[bool, bool],
    terms: LeaseTerms,
) -> AdmitCalls:
    slots = list(terms.slots), terms.of
    return AdmitCalls(model, lease, owner, *several_divided, *slots, terms.batch, terms.vcpus)


def report_fields(report: WorkerOrder) -> list[Any]:
    """A report as it travels: numbers that a program made too large are the largest there are."""
    return [_bounded(value) for value in report]


def read(kind: FrameKind, meta: Any) -> WorkerOrder:
    """The order that a frame carries; BadFrame unless every field is of its type."""
    order = _TYPES.get(kind)
    if order is None:
        raise BadFrame(f"{kind.name} is no order")
    fields = _FIELDS[order]
    if not isinstance(meta, list) or len(meta) != len(fields):
        raise BadFrame(f"{kind.name} with other fields than {order._fields}")
    for name, expected, value in zip(order._fields, fields, meta, strict=True):
        if not _fits(value, expected):
            raise BadFrame(f"{kind.name}: {name} is {shown(value)}")
    return order(*meta)


def _bounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_bounded(each) for each in value]
    if type(value) is float:
        return min(value, _LARGEST) if value > 0 else 0.0  # which is what NaN becomes as well
    return max(0, min(value, MAX_NUMBER - 1)) if type(value) is int else value


def _fits(value: Any, expected: Any) -> bool:
    if get_origin(expected) is list:
        (item,) = get_args(expected)
        return isinstance(value, list) and all(_fits(entry, item) for entry in value)
    if type(value) is not expected:
        return False
    return not isinstance(value, int | float) or 0 <= value < MAX_NUMBER
