"""A call's result: which bytes travel, and how the shim makes tensors of them again."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gpu_manager.worker.call_errors import CallRefused
from gpu_manager.worker.calls.graph_call import Residents
from gpu_manager.worker.program.channel_state import InputStorage, KeptStorages, TensorInput
from gpu_manager.worker.program.tensor_specs import NAMES, bytes_of, extent_of, identity
from torch_shim.wire.protocol import FailureKind

_WIDEST_ELEMENT_BYTES = 16
# A tensor that uses less of the bytes between its first and last than this travels contiguous.
_LEAST_DENSITY = 0.25
_SPARSE_FROM_BYTES = 1 << 16


# Where the offset of a part would stand: its bytes stay with the worker.
_STAYS = -2
_SOLE = 2
_LEAST, _LARGEST = -1 << 63, (1 << 64) - 1  # of the whole numbers that a message may contain


class PackedResult(NamedTuple):
    """What RESULT says, with offsets still to be filled in, and the bytes in their order."""

    storages: list[list[int]]
    views: list[Any]
    changed: list[list[int]]
    parts: list[torch.Tensor]

    def sizes(self) -> list[int]:
        """Bytes of each part."""
        return [part.numel() for part in self.parts]

    def place(self, offsets: Sequence[int]) -> None:
        """Say where each part lies."""
        sent = [(entry, 0) for entry in self.storages if entry[0] != _STAYS]
        sent += [(entry, 1) for entry in self.changed if entry[1] != _STAYS]
        for (entry, field), offset in zip(sent, offsets, strict=True):
            entry[field] = offset


class Packer:
    """Describes the outputs of one call. `inputs` gives the input that lies in a storage."""

    def __init__(
        self,
        inputs: Sequence[dict[int, int]],
        constants: Sequence[torch.Tensor],
        kept: KeptStorages,
        keys: Sequence[int],
        residents: Residents | None = None,
    ) -> None:
        self._constants = {identity(constant.untyped_storage()) for constant in constants}
        self._inputs = inputs
        self._lasting = True
        self._kept = kept
        self._keys = keys
        self._residents = residents
        self._storages: list[list[int]] = []
        self._parts: list[torch.Tensor] = []

    def pack(
        self, outputs: Sequence[Any], changed: list[TensorInput], *, lasting: bool
    ) -> PackedResult:
        """The result of a call that gave these outputs and wrote to these inputs.

        Outputs that are not `lasting` lie in memory that the next call uses again.
        """
        self._lasting = lasting
        views: list[Any] = list(outputs)
        owned: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for number, output in enumerate(outputs):
            if isinstance(output, torch.Tensor):
                tensor = _plain(output)
                storage = identity(tensor.untyped_storage())
                source = self._input_in(storage)
                if source is None:
                    owned.setdefault(storage, []).append((number, tensor))
                else:
                    views[number] = _described(-1 - source, tensor, 0)
            elif output is not None and not isinstance(output, (bool, int, float)):
                detail = f"output {number} is a {type(output).__name__}"
                raise CallRefused(FailureKind.OPERATOR, detail)
            elif isinstance(output, int) and not _LEAST <= output <= _LARGEST:
                raise CallRefused(FailureKind.OPERATOR, f"output {number} has more than 64 bits")
        for group in owned.values():
            self._storage(group, views)
        written = [self._changed(entry) for entry in changed]
        return PackedResult(self._storages, views, written, self._parts)

    def _input_in(self, storage: int) -> int | None:
        for positions in self._inputs:
            if storage in positions:
                return positions[storage]
        return None

    def _storage(self, group: list[tuple[int, torch.Tensor]], views: list[Any]) -> None:
        """Outputs over one storage: each run of bytes that some of them share is one piece."""
        spans = sorted((extent_of(tensor), number, tensor) for number, tensor in group)
        piece: list[tuple[int, torch.Tensor]] = []
        start = stop = 0
        for (first, last), number, tensor in spans:
            if piece and first >= stop:
                self._piece(piece, start, stop, views)
                piece = []
            if not piece:
                start = first - first % _WIDEST_ELEMENT_BYTES
                stop = start
            piece.append((number, tensor))
            stop = max(stop, last)
        self._piece(piece, start, stop, views)

    def _piece(
        self, piece: list[tuple[int, torch.Tensor]], start: int, stop: int, views: list[Any]
    ) -> None:
        if len(piece) == 1 and _is_sparse(piece[0][1], stop - start):
            number, tensor = piece[0]
            piece = [(number, tensor.contiguous())]
            start, stop = 0, piece[0][1].numel() * tensor.element_size()
        storage = piece[0][1].untyped_storage()
        here = len(self._storages)
        for number, tensor in piece:
            views[number] = _described(here, tensor, start // tensor.element_size())
        if self._stays(here, stop - start):
            assert self._residents is not None
            own = self._own(storage, start, stop)
            self._kept.keep_sole(InputStorage(own, self._residents.first_key + here))
            self._storages.append([_STAYS, stop - start, _SOLE])
            return
        key = self._keys[here] if here < len(self._keys) else 0
        if key:
            self._kept.keep(InputStorage(self._own(storage, start, stop), key))
        self._storages.append([0, stop - start, bool(key)])
        self._parts.append(bytes_of(storage, start, stop))

    def _stays(self, number: int, size_bytes: int) -> bool:
        """Whether this output storage stays here until the function looks at it."""
        found = self._residents
        return (
            found is not None
            and size_bytes >= max(found.least_bytes, 1)
            and size_bytes > found.wanted.get(number, 0)
            and self._kept.has_room(size_bytes)
        )

    def _own(self, whole: torch.UntypedStorage, start: int, stop: int) -> torch.UntypedStorage:
        """Part of a storage that may be kept: a copy where it belongs to more than this result."""
        part: torch.UntypedStorage = whole[start:stop]
        shared = identity(whole) in self._constants or not self._lasting
        if shared or whole.nbytes() > 2 * (stop - start):
            part = part.clone()  # type: ignore[no-untyped-call] # torch gives it no types
        return part

    def _changed(self, entry: TensorInput) -> list[int]:
        start, stop = extent_of(entry.tensor)
        residents, key = self._residents, entry.held.key
        if residents is not None and key and stop - start >= max(residents.least_bytes, 1):
            if self._kept.has_sole(key):
                return [entry.position, _STAYS, stop - start]
            if self._kept.has_room(entry.held.storage.nbytes()):
                self._kept.keep_sole(entry.held)
                return [entry.position, _STAYS, stop - start]
        self._parts.append(bytes_of(entry.tensor.untyped_storage(), start, stop))
        return [entry.position, 0, stop - start]


def _plain(output: torch.Tensor) -> torch.Tensor:
    """The output with its values really in its storage."""
    if output.layout is not torch.strided or output.dtype not in NAMES:
        raise CallRefused(FailureKind.OPERATOR, f"output of layout {output.layout}, {output.dtype}")
    if torch._C._functorch.is_functorch_wrapped_tensor(output):  # noqa: SLF001 - torch has no public way to ask
        raise CallRefused(FailureKind.OPERATOR, "an output is still inside of vmap")
    return output.resolve_conj().resolve_neg()


def _described(storage: int, tensor: torch.Tensor, shift: int) -> list[Any]:
    offset = tensor.storage_offset() - shift
    return [storage, NAMES[tensor.dtype], list(tensor.shape), list(tensor.stride()), offset]


def _is_sparse(tensor: torch.Tensor, span_bytes: int) -> bool:
    used_bytes = tensor.numel() * tensor.element_size()
    return span_bytes > _SPARSE_FROM_BYTES and used_bytes < span_bytes * _LEAST_DENSITY
