"""Tensors that functions put for others, by handle: all models of the process may use them.

Nothing is copied: a call of another function, or of another model, reads the same memory. A handle
cannot be guessed, and the process belongs to one tenant. Other processes may borrow a tensor: it
stays until they have given it back.
"""

import os
import threading

import torch

from gpu_manager.devices.lent_memory import LentStorage, Loan
from gpu_manager.worker.program.channel_state import InputStorage

MOST_PUBLISHED = 1024
MOST_PUBLISHED_BYTES = 4 << 30


class PublishedTensor:
    """One storage that was put; `parked` if it lies in host memory for now.

    `uses` is how often other processes have borrowed it.
    """

    def __init__(self, held: InputStorage, about: bytes, model: object) -> None:
        """`about` is for its readers; `model` is whose memory it takes."""
        self.storage: torch.UntypedStorage = held.storage
        self.about = about
        self.size_bytes = held.storage.nbytes()
        self.model = model
        self.parked = held.parked
        self.loan: Loan | None = None
        self.uses = 0
        self._held = held

    def lend(self, loan: Loan) -> None:
        """It is lent from now on, and may lie elsewhere: for who put it, too."""
        if self._held.storage is self.storage:
            self._held.storage = loan.storage
        self.storage, self.loan = loan.storage, loan

    def end_loan(self) -> None:
        """No other process may open it from now on."""
        if self.loan is not None:
            self.loan.close(self.uses)
            self.loan = None


class PublishedData:
    """What was put with one process. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tensors: dict[str, PublishedTensor] = {}
        self._lent: dict[str, PublishedTensor] = {}  # withdrawn, and not given back yet
        self.size_bytes = 0

    def add(self, handle: str, tensor: PublishedTensor) -> bool:
        """Publish a tensor; False if there are too many, or the handle has another one."""
        with self._changed:
            size_bytes = self.size_bytes + tensor.size_bytes
            is_known = handle in self._tensors or handle in self._lent
            if is_known or len(self._tensors) + len(self._lent) >= MOST_PUBLISHED:
                return False
            if size_bytes > MOST_PUBLISHED_BYTES:
                return False
            self._tensors[handle] = tensor
            self.size_bytes = size_bytes
            return True

    def find(self, handle: str) -> PublishedTensor | None:
        with self._changed:
            return self._tensors.get(handle)

    def use(self, handle: str, tensor: PublishedTensor) -> LentStorage | None:
        """Count a use of a lent tensor by another process, and return how that one opens it.

        The caller closes the descriptor. None, and no loan any more, if it was withdrawn.
        """
        with self._changed:
            if self._tensors.get(handle) is not tensor or tensor.loan is None:
                if not tensor.uses:
                    tensor.end_loan()
                return None
            lent = tensor.loan.lent
            if lent.descriptor >= 0:
                lent = lent._replace(descriptor=os.dup(lent.descriptor))
            tensor.uses += 1
            return lent

    def given_back(self, handle: str) -> None:
        with self._changed:
            tensor = self._tensors.get(handle) or self._lent.get(handle)
            if tensor is not None and tensor.uses:
                tensor.uses -= 1
                if handle in self._lent and not tensor.uses:
                    self._forget(self._lent.pop(handle))
                self._changed.notify_all()

    def withdraw(self, handle: str) -> None:
        """Forget the tensor of this handle, when it is given back; who has taken it keeps it."""
        with self._changed:
            tensor = self._tensors.pop(handle, None)
            if tensor is None:
                return
            if tensor.uses:
                self._lent[handle] = tensor
            else:
                self._forget(tensor)

    def forget(self, model: object, within_s: float) -> None:
        """Forget what was withdrawn of a model, when it is given back, or this time has passed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lent_by(model), within_s)
            for handle in self._lent_by(model):
                self._forget(self._lent.pop(handle))

    def of_model(self, model: object) -> dict[str, PublishedTensor]:
        with self._changed:
            return {key: tensor for key, tensor in self._tensors.items() if tensor.model is model}

    def _lent_by(self, model: object) -> list[str]:
        return [handle for handle, tensor in self._lent.items() if tensor.model is model]

    def _forget(self, tensor: PublishedTensor) -> None:
        self.size_bytes -= tensor.size_bytes
        tensor.end_loan()
