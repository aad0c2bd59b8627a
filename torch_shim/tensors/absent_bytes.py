"""Handles whose bytes only a worker has: the bytes come when somebody looks at them.

Until then the pages of such a storage are protected, so that a reader that nobody thought of ends
the process instead of computing with garbage. Operators that need no bytes (views, shapes) run on
the handle as they are.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from torch_shim.errors import BadFrame, RemoteFailure
from torch_shim.process_report import report
from torch_shim.raised_failures import error_of
from torch_shim.tensors import write_epochs
from torch_shim.tensors.dispatch import Operator, names
from torch_shim.wire.manager_session import Fetched
from torch_shim.wire.shared_memory import LentPages, ProtectedMemory, flat, tensor_over

# Operators that read no element: they give views of the same storage, or facts about the tensor.
NO_BYTES = names(
    "__get__ __hash__ __len__ __set__ _is_view alias as_strided as_subclass chunk dense_dim "
    "detach diagonal dim dsplit element_size empty_like expand expand_as get_device hsplit "
    "is_complex is_conj is_contiguous is_floating_point is_inference is_neg is_same_size "
    "is_set_to is_signed moveaxis movedim narrow ndimension nelement new_empty new_full new_ones "
    "new_zeros numel ones_like permute register_hook register_post_accumulate_grad_hook "
    "requires_grad_ retain_grad select size sparse_dim split split_with_sizes squeeze "
    "storage_offset stride swapaxes swapdims t transpose unbind unflatten unfold unsafe_chunk "
    "unsafe_split unsqueeze view view_as vsplit zeros_like"
)
_REMEDY = (
    "Call the model again with tensors that the function has; what shall outlive a worker is to be "
    "copied by .cpu() after the call"
)
_BASIC_INDEX = (int, slice, type(None), type(...))


class BytesHolder(Protocol):
    """A worker that has bytes which this process has not."""

    sole: set[int]

    def drop(self, key: int) -> None:
        """Note that this process needs a storage no more; safe in a finalizer."""

    def is_with(self, peer: Any) -> bool:
        """Whether this worker may use the bytes where they are."""

    def channel_for(self, channel: Any) -> AbstractContextManager[Any]:
        """Yield this channel, or an idle one while the block runs; None if the worker is lost."""

    def fetch(self, key: int, channel: Any) -> Fetched:
        """Return the bytes of a key; RemoteFailure if they are lost."""


# Runs an operator where the bytes are; None if it cannot.
RunThere = Callable[[Operator, tuple[Any, ...], dict[str, Any] | None], Any]


def nowhere(*_: Any) -> None:
    """Operators run in this process: the bytes come for them."""


class AbsentBytes:
    """The bytes of one storage, while only a worker has them."""

    def __init__(self, key: int, memory: ProtectedMemory) -> None:
        self.key = key
        self.absent = False
        self.holder: BytesHolder | None = None
        self.call: Any = None  # a `RememberedCall` that made the bytes, if it can be repeated
        self.run_there: RunThere = nowhere
        self._memory = memory
        self.looked: Callable[[], None] | None = None
        self._lock = threading.Lock()

    @property
    def lent(self) -> LentPages | None:
        """The pages of a worker's file in which the bytes lie, if they came so."""
        return self._memory.lent

    def leave(
        self,
        holder: BytesHolder,
        run_there: RunThere = nowhere,
        looked: Callable[[], None] | None = None,
    ) -> None:
        """From now on only this worker has the bytes.

        `looked` is called when they are fetched from it, unless it ends.
        """
        self.holder, self.run_there, self.looked = holder, run_there, looked
        self.call = None
        holder.sole.add(self.key)
        if not self.absent:
            self._memory.protect()
            waiting[self.key] = weakref.ref(self)
            self.absent = True

    def bring(self, channel: Any = None, *, looks: bool = True) -> None:
        """Fetch the bytes unless they are here; who is using a channel of the worker passes it.

        `looks`: whether the function wants them.
        """
        make_under(self.key)
        holder = self.holder
        if not self.absent or holder is None:
            return
        asked = False
        try:
            asked = self._fetch(holder, channel)
        except RemoteFailure as failure:
            if not self._restore(failure):
                raise error_of(failure, f"{failure}. {_REMEDY}") from failure
        except BadFrame as failure:
            if not self._restore(failure):
                raise RuntimeError(f"CUDA error: {failure}. {_REMEDY}") from failure
        if self.looked is not None and looks and asked:
            self.looked()

    def become(self, made: "AbsentBytes") -> None:
        """Be what names those bytes of a worker from now on, as `made` did."""
        waiting.pop(self.key, None)
        waiting.pop(made.key, None)
        self.holder, self.run_there, self.looked = made.holder, made.run_there, made.looked
        self.key = made.key  # behind the holder: who reads both without a lock finds these two
        made.holder, made.absent = None, False
        waiting[self.key] = weakref.ref(self)

    def fill(self, content: torch.UntypedStorage) -> None:
        """Take bytes that were computed again, unless the bytes have come meanwhile."""
        with self._lock:
            if self._still_absent():
                size = content.nbytes()
                flat_bytes = tensor_over(content, torch.uint8, 0, (size,), (1,))
                self._memory.fill(flat_bytes.numpy().data)
                self._note_here()

    def _fetch(self, holder: BytesHolder, channel: Any) -> bool:
        """Whether a worker that goes on was asked."""
        # The channel before the lock: who has the lock may be waiting for this very channel.
        with holder.channel_for(channel) as using, self._lock:
            if self._still_absent():
                fetched = holder.fetch(self.key, using)
                if fetched.descriptor is None:
                    self._memory.fill(fetched.memory)
                else:
                    self._memory.fill_from(fetched.descriptor, fetched.lent)
                self._note_here()
                report.add(bytes_out=self._memory.size_bytes)
                return not fetched.left
        return False

    def _restore(self, failure: RemoteFailure | BadFrame) -> bool:
        """Have the bytes computed again; return whether they are here now."""
        if self.call is None:
            return not self.absent
        try:
            self.call.restore()
        except RemoteFailure as second:
            reason = f"{failure}; it cannot be computed again, since {second.message}"
            raise error_of(second, f"{reason}. {_REMEDY}") from second
        return not self._still_absent()

    def _note_here(self) -> None:
        self.absent = False
        self.call = None
        waiting.pop(self.key, None)

    def _still_absent(self) -> bool:
        return self.absent

    def __del__(self) -> None:
        self._memory.use_again()
        unmade.pop(self.key, None)
        if self.holder is None:
            return
        if self.absent:
            waiting.pop(self.key, None)
        self.holder.drop(self.key)  # after a look it has a copy


# The storages whose bytes are absent, by key: while there are none, operators skip the check.
waiting: dict[int, "weakref.ref[AbsentBytes]"] = {}

# By the keys of storages that no worker has yet, and of those that they are to be made from, what
# has them made: before such bytes are looked at, and before a call with such an input.
unmade: dict[int, Callable[[int], None]] = {}


def make_under(key: int) -> None:
    make = unmade.get(key)
    if make is not None:
        make(key)


def make_for(args: Iterable[Any]) -> None:
    """Have made what a call gets, and what is to be made from inputs that it may write to."""
    for value in args:
        absent = absent_of(value) if isinstance(value, torch.Tensor) else None
        if absent is not None:
            make_under(absent.key)


def storage_without_bytes(mark: write_epochs.WriteMark, size_bytes: int) -> torch.UntypedStorage:
    """Return a storage with this mark, whose `absent` is to be told who has the bytes."""
    memory = ProtectedMemory.make(size_bytes)
    storage = write_epochs.storage_of(flat(memory, torch.uint8, 0, size_bytes))
    write_epochs.adopt_mark(storage, mark)
    mark.absent = AbsentBytes(mark.key, memory)
    return storage


def absent_of(tensor: torch.Tensor) -> AbsentBytes | None:
    """Return what a tensor lacks; None if its bytes are here."""
    try:
        mark = write_epochs.mark_of(tensor)
    except (NotImplementedError, RuntimeError):  # sparse and functorch's tensors have no storage
        return None
    absent = None if mark is None else mark.absent
    return absent if absent is not None and absent.absent else None


def bring(values: Iterable[Any]) -> None:
    """Fetch the bytes of every tensor among some values, nested lists and maps included."""
    if not waiting:
        return
    for value in values:
        if isinstance(value, torch.Tensor):
            absent = absent_of(value)
            if absent is not None:
                absent.bring()
        elif isinstance(value, list | tuple):
            bring(value)
        elif isinstance(value, dict):
            bring(value.values())


def run_absent(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Run an operator where its input is, and return its result.

    None if it has to run here: then the bytes that it reads have come.
    """
    name = getattr(func, "__name__", "")
    if name in NO_BYTES or (name == "__getitem__" and _is_basic(args[1])):
        return None
    first = args[0] if args else None
    if isinstance(first, list | tuple) and first:
        first = first[0]
    lacking = absent_of(first) if isinstance(first, torch.Tensor) else None
    answer = None if lacking is None else lacking.run_there(func, args, kwargs)
    if answer is None:
        bring(args)
        if kwargs:
            bring(kwargs.values())
    return answer


def _is_basic(index: Any) -> bool:
    """Whether indexing so gives a view."""
    parts = index if type(index) is tuple else (index,)
    return all(type(part) in _BASIC_INDEX for part in parts)


def bring_all() -> None:
    """Fetch everything: a child has no session in which to fetch it."""
    for reference in list(waiting.values()):
        absent = reference()
        if absent is not None:
            absent.bring()


os.register_at_fork(before=bring_all)
