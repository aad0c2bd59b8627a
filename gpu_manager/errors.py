"""What can go wrong in the GPU manager.

GpuManagerError
├── BadSetting           a value that a setting cannot take
├── AddressInUse         another manager listens there
├── NotAllowed           a client asked for what it has no right to
├── UnknownVersion       a client speaks another version of the protocol
├── NoWorker             a model's worker is gone, or never came
├── LeaseOver            a lease that a client named has ended, or is not its own
├── PlacedElsewhere      a model's lease is on another node, where its function did not connect
├── NoScheduler          no scheduler could be reached
├── LoadFailure          a model could not be brought onto its GPU
├── DeviceError
│   ├── NoDriver         NVML or the NVIDIA driver is missing or does not answer
│   └── NoSuchDevice     a choice of devices that this machine cannot give
└── StoreError
    ├── BadImage         not a sealed image, or not the one its table describes
    ├── UnknownImage     no image of that digest, in memory or on disk
    ├── ProofRefused     a function could not prove that it has the weights
    ├── StoreFull        larger than the store, or than what uploads leave of it
    ├── StoreFailed      the machine refused memory or a file
    └── WeightsChanged   a spilled file is not what was written
"""


class GpuManagerError(Exception):
    """Base of every error that the GPU manager raises."""


class DeviceError(GpuManagerError):
    """Something about this machine's GPUs."""


class NoDriver(DeviceError):
    """There is no NVML to ask; the text says what is missing and what to do."""


class NoSuchDevice(DeviceError):
    """The choice of devices cannot be read, or names a GPU that is not there."""

    def __init__(self, choice: str, detail: str) -> None:
        self.choice = choice
        super().__init__(f"devices {choice!r}: {detail}")


class WeightStoreError(GpuManagerError):
    """Base of what the weight store raises."""


class BadImage(WeightStoreError):
    """What was handed over is no image that the store can keep; the text says why."""


class UnknownImage(WeightStoreError):
    """The node has no such weights, neither in memory nor on disk."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        super().__init__(f"no weights of digest {digest}")


class ProofRefused(WeightStoreError):
    """The function's answer shows that it does not have these weights."""

    def __init__(self, function: str, digest: str) -> None:
        self.function = function
        self.digest = digest
        super().__init__(f"{function} did not prove that it has the weights {digest}")


class WeightStoreFull(WeightStoreError):
    """These bytes cannot be kept, whatever leaves."""

    def __init__(self, needed_bytes: int, limit_bytes: int) -> None:
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes
        super().__init__(f"{needed_bytes} bytes of weights, the store has {limit_bytes} for them")


class StoreFailed(WeightStoreError):
    """The operating system refused; the text is its reason."""


class WeightsChanged(WeightStoreError):
    """A spilled file does not hash to its digest any more; it was deleted."""

    def __init__(self, digest: str, detail: str) -> None:
        self.digest = digest
        super().__init__(f"spilled weights {digest}: {detail}")


class BadSetting(GpuManagerError):
    """A setting cannot take this value; `detail` says what is wanted."""

    def __init__(self, setting: str, value: str, detail: str) -> None:
        self.setting = setting
        self.value = value
        super().__init__(f"{setting} {value!r}: {detail}")


class AddressInUse(GpuManagerError):
    """Somebody listens at this address already."""

    def __init__(self, address: str) -> None:
        self.address = address
        super().__init__(f"another GPU manager listens at {address}")


class ClientNotAllowed(GpuManagerError):
    """The client may not do that; the text says what."""


class UnknownVersion(GpuManagerError):
    """A client and this manager speak different versions."""

    def __init__(self, theirs: int, ours: int) -> None:
        self.theirs = theirs
        super().__init__(f"it speaks version {theirs} of the protocol, this manager {ours}")


class NoWorker(GpuManagerError):
    """The process that was to run a model is gone; a new lease brings another one."""

    def __init__(self, model: str, detail: str) -> None:
        self.model = model
        super().__init__(f"the worker of {model}: {detail}")


class LeaseOver(GpuManagerError):
    """A client names a lease that is of no use to it; the text says why."""


class PlacedElsewhere(GpuManagerError):
    """The scheduler chose another node, whose manager the function has to ask."""

    def __init__(self, model: str, node: str) -> None:
        self.model = model
        self.node = node
        super().__init__(f"{model} was placed on node {node}: connect there, with its lease")


class NoScheduler(GpuManagerError):
    """No scheduler that leads lets this node in; the text says what each of them said."""


class LoadFailure(GpuManagerError):
    """A model could not be brought onto its GPU; `out_of_memory` where only room was missing."""

    def __init__(self, model: str, detail: str, *, out_of_memory: bool = False) -> None:
        self.model = model
        self.out_of_memory = out_of_memory
        super().__init__(f"loading {model}: {detail}")
