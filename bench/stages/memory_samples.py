"""What was seen of memory at one moment."""

from typing import NamedTuple


class MemorySample(NamedTuple):
    """Bytes on the GPU of models and of empty processes, and bytes of weights below it."""

    at_s: float
    models_bytes: int
    contexts_bytes: int
    host_bytes: int
    disk_bytes: int
