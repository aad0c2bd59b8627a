"""The line in which a model's calls wait for their turn, and which of them are like each other.

It is in the order of their arrival. Whoever has the turn may answer others that wait, and gives the
turn to the first of the rest. Where calls that run as one stand behind others (the steps of texts
behind the first steps of new ones), those others get as much time as the last group took, and then
the next group comes first. So nobody in a group waits for all others, and the others lose half of
the time at most.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

from gpu_manager.worker.calls.call import CallAnswer, ChannelCall, Recording
from gpu_manager.worker.orders import LeaseTerms, Singly
from gpu_manager.worker.program.build import BuiltProgram
from gpu_manager.worker.program.inputs import Binding, TensorInput
from gpu_manager.worker.program.tensor_specs import identity
from torch_shim.wire.messages import FromArea, FromImage, FromKept, Number, SentTensor


@dataclass(slots=True, eq=False)
class CallInLine:
    """A call in line, and how it was answered by another one's turn."""

    asked: ChannelCall
    asked_s: float = field(default_factory=time.perf_counter)
    likeness: Hashable = None  # calls of an equal one can run as one; None is like no other
    stands_alone: bool = False  # whatever waits beside it
    result: CallAnswer | BaseException | None = None  # once it is done
    turn: threading.Event | None = None

    @property
    def is_done(self) -> bool:
        return self.result is not None

    def wake(self) -> None:
        if self.turn is not None:  # else it is the one that had the turn at once
            self.turn.set()

    def outcome(self) -> CallAnswer:
        assert self.result is not None, "it is asked for when the call is done"
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


class CallLine:
    """Who has the turn, and who waits for it. Thread-safe."""

    def __init__(
        self,
        likeness: Callable[[ChannelCall], Hashable],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`likeness` is asked, on a call's own thread, only when calls wait."""
        self._likeness = likeness
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: deque[CallInLine] = deque()
        self._taken: list[CallInLine] = []  # by the one that has the turn
        self._holder: CallInLine | None = None  # has the turn, since then
        self._since_s = 0.0
        self._grouped: Hashable = None  # what the calls of the last group have in common
        self._grouped_from_s = 0.0  # they come first from then on

    def stand(self, call: CallInLine) -> bool:
        """Wait for the turn: True when the call has it; False when others have answered it."""
        if self.enter(call):
            return True
        assert call.turn is not None, "it waits"
        call.turn.wait()
        return not call.is_done

    def enter(self, call: CallInLine) -> bool:
        """Whether a call has the turn at once; else it stands in line from now on."""
        if self._begins(call):
            return True
        if not call.stands_alone:
            call.likeness = self._likeness(call.asked)
        call.turn = threading.Event()
        return self._begins(call, waits=True)

    def __len__(self) -> int:
        """The calls in it, with the one that has the turn."""
        with self._lock:
            return len(self._waiting) + (self._holder is not None)

    def any_waiting(self) -> bool:
        return bool(self._waiting)

    def count_like(self, call: CallInLine) -> int:
        """How many of those that wait can run with this one, which has the turn."""
        if call.stands_alone:
            return 0
        if call.likeness is None:  # it found nobody in line
            call.likeness = self._likeness(call.asked)
        with self._lock:
            return sum(_is_like(other, call.likeness) for other in self._waiting)

    def take_like(self, call: CallInLine, most: int) -> list[CallInLine]:
        """Take the first of these out of the line; each must be answered or put back."""
        with self._lock:
            group = [other for other in self._waiting if _is_like(other, call.likeness)][:most]
            taken = set(map(id, group))
            self._waiting = deque(other for other in self._waiting if id(other) not in taken)
            self._taken = list(group)
        return group

    def put_back(self, calls: list[CallInLine]) -> None:
        with self._lock:
            self._waiting.extendleft(reversed(calls))

    def note_group(self, call: CallInLine) -> None:
        """Calls like this one, which has the turn, run as one."""
        self._grouped = call.likeness

    def note_single(self, call: CallInLine) -> None:
        """Calls like this one, which has the turn, run as one no more."""
        if self._grouped == call.likeness:
            self._grouped = None

    def leave(self) -> None:
        """Give the turn to the call that is next; wake those that were answered meanwhile."""
        with self._lock:
            now_s = self._clock()
            if self._holder is not None and _is_like(self._holder, self._grouped):
                self._grouped_from_s = now_s + (now_s - self._since_s)
            taken, self._taken = self._taken, []
            following = self._take_next(now_s)
            self._holder, self._since_s = following, now_s
        for call in taken:
            if call.is_done:
                call.wake()
        if following is not None:
            following.wake()

    def _begins(self, call: CallInLine, *, waits: bool = False) -> bool:
        """Take the turn if nobody has it; else the call waits behind the others if it is to."""
        with self._lock:
            if self._holder is None:
                self._holder, self._since_s = call, self._clock()
                return True
            if waits:
                self._waiting.append(call)
            return False

    def _take_next(self, now_s: float) -> CallInLine | None:
        """Take the call that is next out of the line: the first one, or the first of a group."""
        if self._grouped is not None and now_s > self._grouped_from_s:
            for call in self._waiting:
                if _is_like(call, self._grouped):
                    self._waiting.remove(call)
                    return call
        return self._waiting.popleft() if self._waiting else None


def _is_like(call: CallInLine, likeness: Hashable) -> bool:
    return not call.stands_alone and call.likeness is not None and call.likeness == likeness


# Which calls are like each other: the same program and weights, inputs of the same shapes, slots.
#
# Calls with tensors that stay in the worker, such as caches, may be of other shapes and have other
# numbers: those are each call's own. Only what the calls' descriptions say counts; nothing of it
# was looked up yet.

_MOST_BINDINGS = 4096
_NESTED = "_vmap_increment_nesting"


def why_singly(asked: ChannelCall) -> Singly | None:
    """Why a call can never run as one with others, as far as it shows before it runs."""
    if asked.options.repeats:
        return Singly.REPEATED
    if asked.options.rng is not None:
        return Singly.RANDOM
    if asked.mode.arithmetic.deterministic or asked.mode.arithmetic.cudnn_deterministic:
        return Singly.EXACT
    if asked.program.random:
        return Singly.RANDOM
    if asked.program.has_parts:
        return Singly.PARTS
    if any(name.endswith(_NESTED) for name in asked.program.operators):
        return Singly.NESTED
    return None


class Likenesses:
    """Finds what calls have in common. Thread-safe."""

    def __init__(self) -> None:
        self.equal_shapes = WeakSet[BuiltProgram]()  # whose calls run as one only with such inputs
        self._lock = threading.Lock()
        self._numbers: OrderedDict[Hashable, int] = OrderedDict()
        self._of_bindings = WeakKeyDictionary[Binding, int]()
        self._of_recorded = WeakKeyDictionary[Recording, tuple[LeaseTerms, Hashable]]()
        self._last = 0

    def of(self, asked: ChannelCall) -> Hashable:
        """Equal for calls that can run as one; None for one that is like no other."""
        if asked.recorded is None:
            return self._found(asked)
        terms, likeness = self._of_recorded.get(asked.recorded, (None, None))
        if terms is not asked.terms:
            likeness = self._found(asked)
            self._of_recorded[asked.recorded] = asked.terms, likeness
        return likeness

    def _found(self, asked: ChannelCall) -> Hashable:
        if why_singly(asked) is not None:
            return None
        return (
            asked.program.digest,
            0 if asked.binding is None else self._of_binding(asked.binding),
            asked.mode,
            self._inputs(asked),
            asked.terms,
        )

    def _of_binding(self, binding: Binding) -> int:
        """A number that bindings of the same tensors have in common."""
        with self._lock:
            number = self._of_bindings.get(binding)
            if number is None:
                same = tuple(map(_bound, binding.given))
                if same not in self._numbers:
                    self._last += 1
                    self._numbers[same] = self._last
                    if len(self._numbers) > _MOST_BINDINGS:
                        self._numbers.popitem(last=False)
                number = self._of_bindings[binding] = self._numbers[same]
            return number

    def _inputs(self, asked: ChannelCall) -> tuple[Hashable, ...]:
        """Kept ones of any shape, unless calls of the program have failed with such."""
        roughly = any(map(_is_kept, asked.inputs)) and asked.program not in self.equal_shapes
        return tuple(map(_roughly if roughly else _input, asked.inputs))


def _input(sent: SentTensor | Number | str) -> Hashable:
    if not isinstance(sent, SentTensor):
        return type(sent), repr(sent)
    if isinstance(sent.source, FromImage):
        return sent.source, sent.dtype, tuple(sent.shape), tuple(sent.strides), sent.offset
    return sent.dtype, tuple(sent.shape), tuple(sent.strides)


def _is_kept(sent: SentTensor | Number | str) -> bool:
    source = sent.source if isinstance(sent, SentTensor) else None
    return isinstance(source, FromKept) or (isinstance(source, FromArea) and source.key > 0)


def _roughly(sent: SentTensor | Number | str) -> Hashable:
    """The same without shapes, and without numbers."""
    if not isinstance(sent, SentTensor):
        return type(sent).__name__
    return _input(sent) if isinstance(sent.source, FromImage) else (sent.dtype, len(sent.shape))


def _bound(entry: TensorInput) -> Hashable:
    image, spec = entry.held.image, entry.spec
    layout = entry.position, spec.dtype, tuple(spec.shape), tuple(spec.strides), spec.offset
    if image is not None:
        return image.digest, *entry.held.place, layout
    return identity(entry.tensor.untyped_storage()), layout
