"""Errors of the GPU manager.

GpuManagerError
├── BadSetting           a setting has an invalid value
├── AddressInUse         another manager listens at the address
├── ClientNotAllowed     a client asked for something that it has no right to
├── NoWorker             a model's worker has ended, or could not be started
├── LeaseOver            a lease that a client named has ended, or belongs to another client
├── PlacedElsewhere      a model's lease is on another node, whose addresses nobody knows
├── NoScheduler          no scheduler could be reached
├── LoadFailure          a model could not be loaded onto its GPU
├── NoDriver             NVML or the NVIDIA driver is missing or does not answer
├── DataError
│   ├── NoSuchData       no data by this handle is here for this tenant, for whatever reason
│   ├── NoRoomForData    data exceeds what the node, or one tenant, may have
│   └── DataFailed       the operating system refused memory or a file operation
└── WeightStoreError
    ├── BadImage         not a sealed image, or not the one that its table describes
    ├── UnknownImage     no image with this digest, in memory or on disk
    ├── ProofRefused     a function could not prove that it has the weights
    ├── WeightStoreFull  an image exceeds the store, or the room that uploads leave in it
    ├── StoreFailed      the operating system refused memory or a file operation
    ├── ReadingGivenUp   an image that nobody waits for any more was not read to its end
    └── WeightsChanged   a spilled file's content does not match its digest
"""


class GpuManagerError(Exception):
    """Base of every error that the GPU manager raises."""


class NoDriver(GpuManagerError):
    """NVML is not available; the text states what is missing and what to do."""


class WeightStoreError(GpuManagerError):
    """Base of the weight store's errors."""


class BadImage(WeightStoreError):
    """The store cannot keep this image; the text states why."""


class UnknownImage(WeightStoreError):
    """The node has no weights with this digest, neither in memory nor on disk."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"no weights with digest {digest}")


class ProofRefused(WeightStoreError):
    """A function's proof of possession of these weights is wrong."""

    def __init__(self, function: str, digest: str) -> None:
        super().__init__(f"{function} did not prove that it has the weights {digest}")


class WeightStoreFull(WeightStoreError):
    """There is no room for an image, even after evictions."""

    def __init__(self, needed_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{needed_bytes} bytes of weights do not fit into {limit_bytes} bytes")


class StoreFailed(WeightStoreError):
    """The operating system refused memory or a file operation; the text states the reason."""


class WeightsChanged(WeightStoreError):
    """A spilled file's content no longer has its digest; the file was deleted."""

    def __init__(self, digest: str, detail: str) -> None:
        super().__init__(f"spilled weights {digest}: {detail}")


class ReadingGivenUp(WeightStoreError):
    """Nobody waits for an image any more, or the store is closed: it was not read to its end."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"reading weights {digest} was given up")


class DataError(GpuManagerError):
    """Base of errors about data that functions pass to each other."""


class NoSuchData(DataError):
    """A handle is of no use here; who asks does not learn why."""

    def __init__(self) -> None:
        super().__init__(
            "there is no such data: it was dropped, its time was over, its node or worker is lost, "
            "or it never was this namespace's"
        )


class NoRoomForData(DataError):
    """Data exceeds a bound; the text says which one."""

    def __init__(self, needed_bytes: int, detail: str) -> None:
        super().__init__(f"no room for {needed_bytes} bytes of data: {detail}")


class DataFailed(DataError):
    """The operating system refused memory or a file operation; the text states the reason."""


class BadSetting(GpuManagerError):
    """A setting has an invalid value; the text states the reason or the valid values."""

    def __init__(self, setting: str, value: str, detail: str) -> None:
        super().__init__(f"{setting} {value!r}: {detail}")


class AddressInUse(GpuManagerError):
    """Another process already listens at this address."""

    def __init__(self, address: str) -> None:
        super().__init__(f"another GPU manager listens at {address}")


class ClientNotAllowed(GpuManagerError):
    """The client has no right to its request; the text states why."""


class NoWorker(GpuManagerError):
    """The process for a model has ended or does not exist; a new lease gets another one."""

    def __init__(self, model: str, detail: str) -> None:
        super().__init__(f"the worker of {model}: {detail}")


class LeaseOver(GpuManagerError):
    """The lease that a client named is not usable; the text states why."""


class PlacedElsewhere(GpuManagerError):
    """The scheduler placed a model on another node, whose addresses it has not told."""

    def __init__(self, model: str, node: str) -> None:
        super().__init__(f"{model} was placed on node {node}, of which no address is known")


class NoScheduler(GpuManagerError):
    """No leading scheduler accepts this node; the text states each scheduler's reason."""


class LoadFailure(GpuManagerError):
    """A model could not be loaded onto its GPU; `out_of_memory` if memory was lacking."""

    def __init__(self, model: str, detail: str, *, out_of_memory: bool = False) -> None:
        self.out_of_memory = out_of_memory
        super().__init__(f"loading {model}: {detail}")
