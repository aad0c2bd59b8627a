"""What the metadata of frames says, by kind; docs/protocol.md explains the fields.

A frame is decoded as one of these types, which check and bound every field that others send. A
type names no free-form value, so that a message takes memory in proportion to its bytes.
"""

from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct

# The description of one put of data, which its receiver alone reads, and the parts of one put.
MOST_ABOUT_BYTES, MOST_PARTS = 64 << 10, 64
# Where the offset of a result's part would stand: its bytes follow those of the part before it in
# the file or body that came with the answer, or they stay with the worker.
BEHIND, STAYS = -1, -2
# The calls of one channel that are recorded at a time.
MOST_RECORDED = 64
# What an answer says of itself in place of what it is: all is as in the recorded call's.
AS_RECORDED = "as recorded"

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e18)]
Text = Annotated[str, Meta(max_length=1024)]
Token = Annotated[str, Meta(max_length=4096)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Few = Meta(max_length=1024)

# -- shim or administrator -> manager: [number, fields] -------------------------------------------


class Ping(Struct):
    """Ask for an answer at once."""


class Hello(Struct):
    """Say who connects; a channel names its worker."""

    credential: Text
    session: Annotated[str, Meta(min_length=1, max_length=64)]
    role: Literal["shim", "admin", "channel"]
    worker: Text = ""


class AboutImage(Struct):
    """Offer an image, or forget it."""

    digest: Digest


class Prove(Struct):
    """Prove to have an image; without a proof the function may use it already."""

    digest: Digest
    proof: Text | None = None


class Upload(Struct):
    """Give an image: a descriptor comes with the frame, or pieces follow."""

    digest: Digest
    sizes: bytes
    total: Count


class Chunk(Struct):
    """A piece of an image."""

    digest: Digest
    offset: Count
    last: bool


class Acquire(Struct):
    """Wait for a lease.

    `workers` are those to which the session has a channel. `lease` names the session's own lease
    for which it needs another channel; `token` names a lease that its caller was given. With
    `again`, the token's lease was given back early, and its request needs another one.
    """

    models: Annotated[list[Digest], Meta(min_length=1, max_length=64)]
    batch: Annotated[int, Meta(ge=1, lt=1 << 62)]
    workers: Annotated[list[Text], _Few]
    request: Text | None = None
    deadline_s: Seconds | None = None
    token: Token | None = None
    lease: Count | None = None
    again: bool = False
    goes_on: bool = False
    trace: Text | None = None


class Release(Struct):
    """Give back a lease, or say that it was claimed on another node."""

    lease: Count
    request: Text | None = None
    may_return: bool = False


class Where(Struct):
    """Ask for the node of a token's lease."""

    token: Token


class Admin(Struct):
    """An administrator's order or question."""

    do: Text
    model: Text | None = None
    gpu: Text | None = None


class Put(Struct):
    """Put data, whose bytes follow, or which a worker has."""

    size: Count
    about: Annotated[bytes, Meta(max_length=MOST_ABOUT_BYTES)]
    lifetime_s: Seconds | None = None
    parts: Annotated[list[Text], Meta(max_length=MOST_PARTS)] = []
    wished: bool = False
    worker: Text | None = None


class Get(Struct):
    """Ask what data is, and, if it is to be `here`, for its bytes from an offset on."""

    handle: Text
    here: bool = False
    offset: Count | None = None


class Piece(Struct):
    """A piece of data; a local client has written it itself, and sends the last one alone."""

    handle: Text
    last: bool
    offset: Count | None = None


class AboutData(Struct):
    """End data, or give back its file."""

    handle: Text


# -- manager -> shim or administrator, which trust it ---------------------------------------------

Answer = tuple[int, dict[str, Any]]
Refused = tuple[int, str, str, dict[str, Any]]

# -- shim -> worker -------------------------------------------------------------------------------

_Size = Annotated[int, Meta(ge=0, lt=1 << 48)]
_Sizes = Annotated[list[_Size], Meta(max_length=64)]
# Of a result: an expanded tensor may have any number of elements.
_Counts = Annotated[list[Count], Meta(max_length=64)]
Number = bool | int | float | None


class FromImage(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0):
    """Bytes of a model's weights."""

    digest: str
    offset: Count
    size_bytes: Count


class FromKept(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """A storage that the worker keeps."""

    key: Count
    epoch: Count


class FromArea(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """Bytes that came with the call, or that lie in a block; the worker keeps them under a key."""

    offset: Count
    size_bytes: Count
    key: Count  # 0: it does not keep them
    epoch: Count
    block: Count = 0  # 0: they lie in the area


class SentTensor(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor over a storage; strides and offset in elements."""

    source: FromImage | FromKept | FromArea
    dtype: str
    shape: _Sizes
    strides: _Sizes
    offset: _Size


Matmul = Literal["highest", "high", "medium"]  # the others use tf32


class Arithmetic(NamedTuple):
    """The settings of torch that change how a GPU computes; the defaults are torch's own."""

    matmul: Matmul = "highest"
    cudnn_tf32: bool = True
    cudnn_benchmark: bool = False
    cudnn_deterministic: bool = False
    # algorithms: 0 any, 1 a warning for others, 2 no others
    deterministic: Annotated[int, Meta(ge=0, le=2)] = 0


class Residents(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the shim says about outputs and changed inputs that it may never look at.

    Storages of at least `least_bytes` stay with the worker, output storage n under `first_key` + n,
    unless it is `wanted` up to its size. `dropped` are the keys of those that the function needs no
    more, or the negative numbers of files of results that it gives back.
    """

    first_key: Annotated[int, Meta(gt=0, lt=1 << 62)]
    least_bytes: int
    wanted: dict[int, int]
    dropped: list[int]


_Recorded = Annotated[int, Meta(ge=1, le=MOST_RECORDED)]


class Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Have the worker keep a call, to be run again by its number, with what its inputs hold then.

    At `notes`, an offset of the arena, lie what such a run says beside its outputs, and its trace.
    There are none, and `notes` is 0, for a call that CALL_AGAIN repeats.
    """

    number: _Recorded
    notes: Count


class CallOptions(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a call is to be run. One that `repeats` another was in a worker that died."""

    autocast: str | None = None
    rng: bytes | None = None  # the generator's state
    keys: list[int] = []  # under which the worker keeps output storages; 0: it does not
    default_dtype: str | None = None  # None: float32
    trace: Annotated[str, Meta(max_length=128)] = ""
    arithmetic: Arithmetic | None = None  # None: torch's own
    residents: Residents | None = None
    repeats: bool = False
    record: Record | None = None

    def alone(self) -> "CallOptions":
        """Without what is one call's own."""
        return CallOptions(self.autocast, None, [], self.default_dtype, "", self.arithmetic)


class Call(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Run a program. An input that is None is bound; a text is refused by its position."""

    lease: int
    program: int
    binding: int | None
    inputs: list[SentTensor | Number | str]
    options: CallOptions


class CallAgain(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Run a recorded call with the kept storages of these keys and epochs, in its inputs' order."""

    lease: int
    number: _Recorded
    kept: list[tuple[Count, Count]]
    options: CallOptions


Arena = tuple[Count]  # its bytes
Define = tuple[int, str]  # a program's number and digest
Bind = tuple[int, int, dict[int, SentTensor]]  # program, binding, tensors by position
Drop = list[int]  # keys
Share = tuple[Count, Count]  # a block's key and bytes
RunAgain = tuple[_Recorded, int]  # of a recorded call; lease


class Fetch(Struct, array_like=True, forbid_unknown_fields=True):
    """Send a kept storage; the file that it comes in may be one to be given back."""

    key: int
    epoch: int
    gives_back: bool = False


class Publish(Struct, array_like=True, forbid_unknown_fields=True):
    """Let others use a kept storage: by this handle, or, if it is empty, by one of the worker's."""

    key: int
    epoch: int
    about: bytes
    handle: str = ""
    lifetime_s: Annotated[float, Meta(ge=0.0, le=1e9)] | None = None  # the manager bounds it


class Take(Struct, array_like=True, forbid_unknown_fields=True):
    """Keep data under a key: published by this handle, or, if it is empty, from a file."""

    key: int
    handle: str = ""
    start: Count = 0
    size_bytes: Count = 0


# -- worker -> shim, which computes with what may have gone mad -----------------------------------

_Place = Annotated[int, Meta(ge=STAYS, lt=1 << 62)]


class OutputPart(Struct, array_like=True, forbid_unknown_fields=True):
    """The bytes of a storage that outputs lie in, and whether the worker keeps them."""

    offset: _Place
    size_bytes: Count
    kept: bool


class ChangedInput(Struct, array_like=True, forbid_unknown_fields=True):
    """The new bytes of an input that the program wrote to."""

    position: Count
    offset: _Place
    size_bytes: Count


class SentOutput(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An output over a storage of the result; source -1 - n is the storage of input n."""

    source: int
    dtype: str
    shape: _Counts
    strides: _Counts
    offset: Count


# Seconds; a difference of times may be a little below zero.
_Span = Annotated[float, Meta(ge=-1e18, le=1e18)]


class CallResult(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A call's answer: its parts, its outputs, and the generator's state behind it."""

    storages: list[OutputPart]
    views: list[SentOutput | Number]
    changed: list[ChangedInput]
    rng: bytes | None
    # waiting for the GPU, transfer, compute, and of the transfer that back
    times: tuple[_Span, _Span, _Span, _Span]
    file: Count = 0  # the number of the file that is to be given back
    # None: nobody asked for a recording; a text: why there is none, which is empty if there is one,
    # or AS_RECORDED, where parts, outputs and changed inputs are those of the recorded call.
    recorded: Text | None = None


class Done(Struct, array_like=True, forbid_unknown_fields=True):
    """The answer to all but a call: what was asked for, and the file that is to be given back."""

    size_bytes: Count = 0
    file: Count = 0
    handle: str = ""
    about: bytes = b""


Failed = tuple[str, str, dict[str, int | float | str | list[int] | None]]
# Key, epoch, offset and size of each storage that a worker alone has, as it ends.
Left = list[tuple[Count, Count, Count, Count]]
