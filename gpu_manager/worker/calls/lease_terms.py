"""What a lease says of its calls: its slots of the GPU, how many run as one, and virtual CPUs."""

from typing import NamedTuple


class LeaseTerms(NamedTuple):
    """The slots by number, of so many that the GPU has; none where the lease has the whole GPU.

    No more than `batch` calls run as one, and they compute with `vcpus` threads of the host at
    most; 0 says nothing.
    """

    slots: tuple[int, ...] = ()
    of: int = 1
    batch: int = 0
    vcpus: int = 0

    @property
    def share(self) -> float:
        """The share of the GPU's compute."""
        return len(self.slots) / self.of if self.slots else 1.0


USUAL_TERMS = LeaseTerms()
