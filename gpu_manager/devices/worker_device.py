"""What the rest of the worker needs of its GPU, real or emulated."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from gpu_manager.devices.image_file import ImageFile
from gpu_manager.devices.lent_memory import Borrowed, LentStorage, Loan
from gpu_manager.devices.loads import TransferRank
from gpu_manager.devices.paths import DeviceLink

Result = TypeVar("Result")
Unshare = Callable[[], None]  # undoes the preparation of host memory; no call may be under way
Refill = Callable[[torch.UntypedStorage, memoryview, int, int], None]


class Recording(Protocol):
    """Work that was recorded: it reads and writes the same memory whenever it is replayed."""

    def replay(self) -> None:
        """Do it again."""


class WorkRecorder(Protocol):
    """Records work on the device (a CUDA graph), so that it costs one launch from then on."""

    def record(self, work: Callable[[], Result]) -> tuple[Recording, Result]:
        """The recorded work and what it gave; CannotRecord where it does not allow that."""


class WorkerDevice(Protocol):
    """A worker's GPU. All but `overhead_bytes` and `load`, which may run while the device
    is made ready, is called by one thread at a time."""

    device: torch.device
    recorder: "WorkRecorder | None"  # where work can be recorded and replayed
    link: DeviceLink  # which everything passes between the process and the GPU
    keeps_memory: bool  # whether memory that a call took stays with the process for the next one
    borrowers_copy: bool  # whether what is lent has to stay where it is until it is given back

    def warm(self) -> None:
        """Do ahead what the first use would have to do."""

    def wait_for_copies(self) -> None:
        """Wait until an image can be loaded; `warm` may go on meanwhile, in another thread."""

    def overhead_bytes(self) -> int:
        """GPU memory that the process takes without any model."""

    def used_bytes(self) -> int:
        """GPU memory that others lack now: overhead, weights, recordings, and what is kept for the
        next call."""

    def held_bytes(self) -> int:
        """What a part has between calls; 0 where memory that a call took stays with the model."""

    def limit_together(self, most_bytes: int) -> None:
        """Let all parts have no more than this at once, or be OutOfMemory by others."""

    def release_beside(self) -> None:
        """Give back what other parts hold only to be used again; no call of theirs is under way."""

    def limit(self, limit_bytes: int) -> None:
        """Let nothing be allocated beyond this, as far as the system can enforce it."""

    def release(self) -> None:
        """Give back memory that is held only to be used again."""

    def after_call(self) -> None:
        """Give back memory that later calls will hardly need."""

    def use_share(self, share: float) -> None:
        """Run on no more than this share of the GPU from now on, in threads adopted from now on.

        ShareRefused where the GPU cannot be shared so.
        """

    def serve(self, share: float, threads: int) -> None:
        """Have this thread's calls compute with such a share of the GPU, from now on.

        Of an emulated one also with so many threads of the host at most, unless it is 0. No more
        than the model's own share is asked for; ShareRefused where that cannot be had.
        """

    def adopt_thread(self) -> None:
        """Have this thread work for this model alone, from now on."""

    def part(self, model: int) -> "WorkerDevice":
        """The part of one of several models of the process: its own limit, its own account."""

    def clear(self) -> None:
        """Give back all that a model took, of which nothing is used any more, and lift its limit.

        Only what the process had before the model stays.
        """

    def load(self, image: ImageFile) -> list[torch.UntypedStorage]:
        """The image's storages on the device, in the order of its table."""

    def restore(self, image: ImageFile, number: int, storage: torch.UntypedStorage) -> None:
        """Make a storage what the image says again."""

    def receive(self, area: memoryview, offset: int, size_bytes: int) -> torch.UntypedStorage:
        """A copy of an area's bytes on the device; OutOfMemory where there is no room for it.

        The caller can write to the area at any time, also between a check of the bytes and their
        use; the copy stays as it was checked.
        """

    def borrow(self, area: memoryview, offset: int, size_bytes: int) -> torch.UntypedStorage:
        """An area's bytes themselves, where the device can work on the host's memory.

        The caller can write to them at any time.
        """

    def park(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A copy in host memory, which does not count as the device's."""

    def unpark(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A parked storage on the device again; OutOfMemory where there is no room for it."""

    def duplicate(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A copy of a storage of the device; OutOfMemory where there is no room for it."""

    def lend(self, storage: torch.UntypedStorage) -> Loan | None:
        """Let other processes open a storage of the device, which nobody writes to meanwhile.

        None where it cannot be had by others.
        """

    def open_lent(self, lent: LentStorage, *, same_gpu: bool) -> Borrowed:
        """A storage that another process lends, or a copy of it on this device.

        CannotBorrow where it is none, or no way leads there; OutOfMemory where there is no room.
        """

    @property
    def refill(self) -> Refill | None:
        """Replaces what `receive` copied by an area's bytes of now: storage, area, offset, size.

        None where copies of inputs should not stay on the device between calls.
        """

    def run(self, work: Callable[[], Result], *, measure: bool) -> tuple[Result, int]:
        """Do some work; with `measure`, also the most memory in use during it, else 0.

        Raises OutOfMemory where the work failed for want of memory, ContextLost where no further
        work can be done.
        """

    def seed(self, state: bytes) -> None:
        """Have random numbers be drawn as this state of torch's CPU generator says."""

    def seeded(self, state: bytes) -> bytes:
        """The CPU generator's state behind a call that began with `state`."""

    def send(
        self,
        parts: list[torch.Tensor],
        places: list[memoryview],
        rank: TransferRank = TransferRank.CALL,
    ) -> None:
        """Copy tensors without gaps to host memory of the same sizes; they are there on return."""

    def share(self, area: memoryview) -> Unshare | None:
        """Prepare host memory for transfers; None where there is nothing to undo."""


class DeviceImage:
    """The storages of one model. They are the image's content whenever no call runs."""

    def __init__(self, file: ImageFile, device: WorkerDevice) -> None:
        self.digest = file.digest
        self.total_bytes = file.total_bytes
        self._file = file
        self._device = device
        self._storages = device.load(file)
        self._numbers = {entry: number for number, entry in enumerate(file.table)}

    def close(self) -> bool:
        """Let the weights go; return whether nothing else refers to them."""
        self._storages.clear()
        return self._file.close()

    def storage(self, offset: int, size_bytes: int) -> torch.UntypedStorage | None:
        """The storage that lies there; None if the image has none of that place and size."""
        number = self._numbers.get((offset, size_bytes))
        return None if number is None else self._storages[number]

    def restore(self, offset: int, size_bytes: int) -> None:
        """Undo what a program wrote to a storage."""
        number = self._numbers[(offset, size_bytes)]
        self._device.restore(self._file, number, self._storages[number])
