"""The part of a GPU's multiprocessors that one model has now, and torch's stream of it."""

from typing import Any

import torch

from gpu_manager.worker.device.shares.sm_partitions import SmPartition, SmPartitions


class SmShare:
    """A model's share: its own, or what the lease of the call under way leaves of that."""

    def __init__(self, partitions: SmPartitions, cuda: Any, device: torch.device) -> None:
        """`cuda` is torch's module."""
        self.stream: Any = None  # None: the model has the whole GPU, and its usual stream
        self.partitions = partitions
        self._cuda = cuda
        self._device = device
        self._was_divided = False
        self._partition: SmPartition | None = None
        self._share = 1.0

    def use(self, share: float) -> bool:
        """Have this share from now on; return whether it was another one; ShareRefused if none."""
        if share == self._share:
            return False
        self.give_back()
        if share < 1:
            self._partition = self.partitions.take(share)
            self.stream = self._cuda.ExternalStream(self._partition.stream, self._device)
            self._was_divided = True
        self._share = share
        return True

    def adopt_thread(self) -> None:
        """Have this thread's work go to the share's stream; at first that is the usual one."""
        if self._was_divided:
            usual = self.stream is None
            stream = self._cuda.default_stream(self._device) if usual else self.stream
            self._cuda.set_stream(stream)

    def give_back(self) -> None:
        """Nothing runs on it any more."""
        if self._partition is not None:
            self.partitions.give_back(self._partition)
        self._partition, self.stream, self._share = None, None, 1.0
