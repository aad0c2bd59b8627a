"""Which outputs of a program stay with the worker until the function looks at them."""

import itertools
from functools import partial

import torch

from torch_shim.errors import BadFrame
from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import RunThere, storage_without_bytes
from torch_shim.tensors.handles import CudaTensor
from torch_shim.wire.arena import tensor_over
from torch_shim.wire.bounded_msgpack import shown
from torch_shim.wire.worker_peer import WorkerPeer

# A smaller output is sent: asking for it later would cost more than its bytes.
LEAST_BYTES = 64 << 10
# Whether larger outputs are still looked at is tried again now and then.
_TRIED_FROM_BYTES = 1 << 20
_TRIED_EVERY = 16
_GROWTH = 2  # an output that has grown by this factor is perhaps not what was looked at

# Each call has the keys from one of these numbers on: no other storage has any of them.
_first_keys = itertools.count(1 << 40, 1 << 16)
_use_count = torch._C._storage_Use_Count  # noqa: SLF001 - shows whether another tensor uses it
_set = torch._C.TensorBase.set_  # noqa: SLF001 - the original, not the shim's replacement


class OutputHabits:
    """What a function did with one program's outputs: what it looks at is sent at once."""

    def __init__(self) -> None:
        self._looked: dict[int, int] = {}  # the sizes of outputs that were fetched, by number
        self._calls = 0

    def wanted(self) -> list[list[int]]:
        """Return what the next call should send: numbers of outputs, and up to which size."""
        self._calls += 1
        tries = not self._calls % _TRIED_EVERY
        return [
            [number, _GROWTH * size]
            for number, size in list(self._looked.items())
            if not tries or size < _TRIED_FROM_BYTES
        ]

    def look(self, number: int, size_bytes: int) -> None:
        """Remember that an output was fetched."""
        self._looked[number] = size_bytes


class StayingOutputs:
    """The outputs and changed inputs of one call that stay with the worker."""

    def __init__(self, habits: OutputHabits, peer: WorkerPeer, run_there: RunThere) -> None:
        self._run_there = run_there
        self._habits = habits
        self._peer = peer
        self._first_key = next(_first_keys)
        self._dropped = peer.take_dropped()
        self.large: list[int] = []  # outputs in storages of their own, which stayed or came
        self.repeatable = True  # False once it has written to an input
        self.option = [self._first_key, LEAST_BYTES, habits.wanted(), self._dropped]

    def give_up(self) -> None:
        """The call has failed: name again what the function needs no more."""
        for key in self._dropped:
            self._peer.drop(key)

    def output(self, number: int, size_bytes: int) -> torch.UntypedStorage:
        """Return the storage of an output that stayed."""
        if type(size_bytes) is not int or size_bytes <= 0:
            raise BadFrame(f"an output of {shown(size_bytes)} bytes stays with the worker")
        mark = write_epochs.WriteMark(self._first_key + number)
        storage = storage_without_bytes(mark, size_bytes)
        looked = partial(self._habits.look, number, size_bytes)
        mark.absent.leave(self._peer, self._run_there, looked)
        return storage

    def changed(self, value: torch.Tensor) -> bool:
        """Note that the worker wrote to a storage that it keeps.

        Return False if this process needs the bytes, because other tensors use its storage.
        """
        mark = write_epochs.marked(value)
        if mark.absent is None and not _adopt(value, mark):
            return False
        mark.absent.leave(self._peer, self._run_there)
        return True


def _adopt(value: torch.Tensor, mark: write_epochs.WriteMark) -> bool:
    """Move a tensor to a storage whose bytes can be absent, if no other tensor uses the former."""
    former = write_epochs.storage_of(value)
    fixed = value.is_inference() and not torch.is_inference_mode_enabled()
    alone = _use_count(former._cdata) == len(("the tensor", "former"))  # noqa: SLF001 - as above
    if fixed or not alone or not isinstance(value, CudaTensor):
        return False
    storage = storage_without_bytes(mark, former.nbytes())
    with torch.no_grad():
        _set(value, storage, value.storage_offset(), value.size(), value.stride())
    return True


def overwrite(value: torch.Tensor, content: torch.Tensor) -> None:
    """Write a storage's whole content, as bytes, to the storage of a tensor."""
    storage = write_epochs.storage_of(value)
    with torch.no_grad():
        tensor_over(storage, torch.uint8, 0, (storage.nbytes(),), (1,)).copy_(content)
