"""Which calls are like each other: the same program and weights, inputs of the same shapes, slots.

Calls with tensors that stay in the worker, such as caches, may be of other shapes and have other
numbers: those are each call's own. Only what the calls' descriptions say counts; nothing of it was
looked up yet.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable

from gpu_manager.worker.calls.call import ChannelCall
from gpu_manager.worker.orders import Singly
from gpu_manager.worker.program.channel_state import Binding, TensorInput
from gpu_manager.worker.program.tensor_specs import identity
from torch_shim.wire.messages import FromArea, FromImage, FromKept, Number, SentTensor

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
        self._lock = threading.Lock()
        self._bindings: OrderedDict[Hashable, int] = OrderedDict()
        self._last = 0

    def of(self, asked: ChannelCall) -> Hashable:
        """Equal for calls that can run as one; None for one that is like no other."""
        if why_singly(asked) is not None:
            return None
        return (
            asked.program.digest,
            0 if asked.binding is None else self._of_binding(asked.binding),
            asked.mode,
            _inputs(asked),
            asked.terms,
        )

    def _of_binding(self, binding: Binding) -> int:
        """A number that bindings of the same tensors have in common."""
        if not binding.likeness:
            same = tuple(map(_bound, binding.given))
            with self._lock:
                if same not in self._bindings:
                    self._last += 1
                    self._bindings[same] = self._last
                    if len(self._bindings) > _MOST_BINDINGS:
                        self._bindings.popitem(last=False)
                binding.likeness = self._bindings[same]
        return binding.likeness


def _inputs(asked: ChannelCall) -> tuple[Hashable, ...]:
    roughly = any(map(_is_kept, asked.inputs)) and not asked.program.merges_equal_shapes
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
