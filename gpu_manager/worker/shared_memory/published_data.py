"""Tensors that functions put for others, by handle: all models of the process may use them.

Nothing is copied: a call of another function, or of another model, reads the same memory. A handle
cannot be guessed, and the process belongs to one tenant.
"""

import threading

import torch

MOST_PUBLISHED = 1024
MOST_PUBLISHED_BYTES = 4 << 30


class PublishedTensor:
    """One storage that was put; `parked` if it lies in host memory for now."""

    def __init__(
        self, storage: torch.UntypedStorage, about: bytes, model: object, *, parked: bool
    ) -> None:
        """`about` is for its readers; `model` is whose memory it takes."""
        self.storage = storage
        self.about = about
        self.size_bytes = storage.nbytes()
        self.model = model
        self.parked = parked


class PublishedData:
    """What was put with one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tensors: dict[str, PublishedTensor] = {}
        self.size_bytes = 0

    def __bool__(self) -> bool:
        return True  # also without a tensor

    def __len__(self) -> int:
        return len(self._tensors)

    def add(self, handle: str, tensor: PublishedTensor) -> bool:
        """Publish a tensor; False if there are too many, or the handle has another one."""
        with self._lock:
            size_bytes = self.size_bytes + tensor.size_bytes
            if handle in self._tensors or len(self._tensors) >= MOST_PUBLISHED:
                return False
            if size_bytes > MOST_PUBLISHED_BYTES:
                return False
            self._tensors[handle] = tensor
            self.size_bytes = size_bytes
            return True

    def find(self, handle: str) -> PublishedTensor | None:
        """Return the tensor of this handle."""
        with self._lock:
            return self._tensors.get(handle)

    def withdraw(self, handle: str) -> PublishedTensor | None:
        """Forget the tensor of this handle; who has taken it keeps it."""
        with self._lock:
            found = self._tensors.pop(handle, None)
            self.size_bytes -= 0 if found is None else found.size_bytes
            return found

    def of_model(self, model: object) -> dict[str, PublishedTensor]:
        """Return what takes this model's memory, by handle."""
        with self._lock:
            return {key: found for key, found in self._tensors.items() if found.model is model}
