"""Shares of a GPU's multiprocessors: CUDA's green contexts, each with a stream of its own.

A kernel runs on the multiprocessors of its stream's green context; memory is the process's,
whatever the context. The driver cuts the multiprocessors into equal groups (of 8 on an H100, of 2
to 4 on older cards); a share is made of neighbouring groups, those that fewest other models of the
process have. Models of two processes may have the same groups: without MPS their kernels take turns
on the whole GPU anyway. An H200 has run it (`tests/gpu`): a quarter takes about four times as long.
"""

import importlib
import threading
from dataclasses import dataclass
from typing import Any

import torch

from gpu_manager.call_errors import ShareRefused

_SUCCESS = 0
# Newer bindings than CUDA 12.4's, which has green contexts first, name them all.
_BINDINGS = "cuda.bindings.driver"


@dataclass(slots=True, eq=False)
class SmPartition:
    """Neighbouring groups of multiprocessors, and the handle of a stream that uses no others."""

    first: int
    groups: int
    multiprocessors: int
    stream: int
    in_use: bool = False


class SmPartitions:
    """The multiprocessors of this process's GPU, in groups that its models have alone or share.

    Partitions are kept for later models of the same share: libraries keep memory for each stream.
    """

    def __init__(self, driver: Any = None) -> None:
        """`driver` stands in for NVIDIA's bindings in tests."""
        self._driver = driver
        self._device: Any = None
        self._groups: list[Any] = []
        self._per_group = self._all = 0
        self._made: dict[tuple[int, int], list[SmPartition]] = {}
        self._lock = threading.Lock()

    def take(self, share: float) -> SmPartition:
        """Groups of at least one and about this share of the GPU; ShareRefused if it has none.

        The process must have a context on the GPU.
        """
        with self._lock:
            try:
                self._split()
                wanted = max(1, round(share * self._all / self._per_group))
                place = self._least_used(min(wanted, len(self._groups)))
                known = self._made.setdefault(place, [])
                found = next((each for each in known if not each.in_use), None)
                if found is None:
                    found = self._make(*place)
                    known.append(found)
            except (RuntimeError, AttributeError, ImportError) as error:
                raise ShareRefused(share, str(error)) from error
            found.in_use = True
            return found

    def give_back(self, partition: SmPartition) -> None:
        """The model has left, and nothing of it runs any more."""
        with self._lock:
            partition.in_use = False

    def _split(self) -> None:
        """Have the driver cut the multiprocessors, once: only groups of one cut can be joined."""
        if self._groups:
            return
        driver = self._bindings()
        self._device = self._done(driver.cuDeviceGet(0))
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = self._done(driver.cuDeviceGetDevResource(self._device, kind))
        self._all = int(whole.sm.smCount)
        # As many groups as there are, each of the fewest that the driver allows.
        groups, count, _ = self._done(driver.cuDevSmResourceSplitByCount(self._all, whole, 0, 1))
        self._groups = list(groups)[: int(count)]
        if not self._groups:
            raise RuntimeError("the driver makes no group of multiprocessors")
        self._per_group = int(self._groups[0].sm.smCount)

    def _least_used(self, wanted: int) -> tuple[int, int]:
        users = [0] * len(self._groups)
        for partition in (each for made in self._made.values() for each in made if each.in_use):
            for group in range(partition.first, partition.first + partition.groups):
                users[group] += 1
        places = range(len(self._groups) - wanted + 1)
        first = min(places, key=lambda place: (sum(users[place : place + wanted]), place))
        return first, wanted

    def _make(self, first: int, count: int) -> SmPartition:
        driver = self._bindings()
        chosen = self._groups[first : first + count]
        described = self._done(driver.cuDevResourceGenerateDesc(chosen, count))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = self._done(driver.cuGreenCtxCreate(described, self._device, flags))
        waits_for_none = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = self._done(driver.cuGreenCtxStreamCreate(context, waits_for_none, 0))
        return SmPartition(first, count, count * self._per_group, int(stream))

    def _bindings(self) -> Any:
        if self._driver is None:
            # They come with torch's builds for CUDA; others lack them.
            self._driver = importlib.import_module(_BINDINGS)
        return self._driver

    @staticmethod
    def _done(answer: tuple[Any, ...]) -> Any:
        status, *found = answer
        if int(status) != _SUCCESS:
            raise RuntimeError(f"the driver says {getattr(status, 'name', status)}")
        return found[0] if len(found) == 1 else found


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
