"""Which calls are like each other: the same program and weights, inputs of the same shapes, slots.

Calls with tensors that stay in the worker, such as caches, may be of other shapes and have other
numbers: those are each call's own. Only what the calls' descriptions say counts; nothing of it was
checked yet.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from gpu_manager.worker.calls.call import ChannelCall, GraphCall
from gpu_manager.worker.merging.records import Singly
from gpu_manager.worker.program.channel_state import Binding, TensorInput
from gpu_manager.worker.program.inputs import AREA, IMAGE, KEPT
from gpu_manager.worker.program.tensor_specs import identity

_MOST_BINDINGS = 4096
_KEY = 2  # where the key stands behind the kind of what lies in the area
_NESTED = "_vmap_increment_nesting"


def why_singly(asked: ChannelCall) -> Singly | None:
    """Why a call can never run as one with others, as far as it shows before it runs."""
    call = asked.call
    if call.options.repeats:
        return Singly.REPEATED
    if call.options.rng is not None:
        return Singly.RANDOM
    if call.options.arithmetic.deterministic or call.options.arithmetic.cudnn_deterministic:
        return Singly.EXACT
    if call.program.random:
        return Singly.RANDOM
    if call.program.has_parts:
        return Singly.PARTS
    if any(name.endswith(_NESTED) for name in call.program.operators):
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
        call = asked.call
        if why_singly(asked) is not None:
            return None
        try:
            found = (
                call.program.digest,
                0 if call.binding is None else self._of_binding(call.binding),
                call.options.mode(),
                _inputs(call),
                asked.terms,
            )
            hash(found)
        except (TypeError, ValueError, IndexError):  # the call is refused when it is read
            return None
        return found

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


def _inputs(call: GraphCall) -> tuple[Hashable, ...]:
    roughly = any(map(_is_kept, call.inputs)) and not call.program.merges_equal_shapes
    return tuple(map(_roughly if roughly else _input, call.inputs))


def _input(described: Any) -> Hashable:
    if not isinstance(described, list):
        return type(described), repr(described)
    source, dtype, shape, strides, offset = described[:5]
    if source[0] == IMAGE:
        return tuple(source), dtype, tuple(shape), tuple(strides), offset
    return dtype, tuple(shape), tuple(strides)


def _is_kept(described: Any) -> bool:
    if not isinstance(described, list):
        return False
    kind, *rest = described[0]
    return bool(kind == KEPT or (kind == AREA and rest[_KEY] > 0))


def _roughly(described: Any) -> Hashable:
    """The same without shapes, and without numbers."""
    if not isinstance(described, list):
        return type(described).__name__
    source, dtype, shape = described[:3]
    return _input(described) if source[0] == IMAGE else (dtype, len(shape))


def _bound(entry: TensorInput) -> Hashable:
    image, spec = entry.held.image, entry.spec
    layout = entry.position, spec.dtype, tuple(spec.shape), tuple(spec.strides), spec.offset
    if image is not None:
        return image.digest, *entry.held.place, layout
    return identity(entry.tensor.untyped_storage()), layout
