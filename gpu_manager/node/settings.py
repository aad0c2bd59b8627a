"""The settings of a GPU manager: one frozen value, built at the entry point."""

from dataclasses import dataclass, field
from pathlib import Path

from common.addresses import Address
from common.gpu_wishes import PROCESS
from gpu_manager.node.leases import LeaseTimes

GIB = 1 << 30
MOST_SLOTS = 64  # of a GPU


@dataclass(frozen=True, slots=True)
class EmulatedTimes:
    """The least times of an emulated GPU: for a load, for each GiB of a load, and for a run.

    All loads of the node share the disk, which moves so many bytes a second (0: as fast as it can).
    All that goes to or from its GPUs shares the PCIe, which moves so many in each direction; if it
    is `pcie_per_gpu`, each GPU has one of its own. A process's context takes `context_s` to make,
    and `context_bytes` of GPU memory.
    """

    load_s: float = 0.0
    load_s_per_gib: float = 0.0
    run_s: float = 0.0
    disk_bytes_per_s: float = 0.0
    pcie_bytes_per_s: float = 0.0
    pcie_per_gpu: bool = False
    context_s: float = 0.0
    context_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """One node: its GPUs, its memory for weights, and where it listens."""

    node: str
    listen: tuple[Address, ...]
    advertise: tuple[Address, ...] = ()  # for functions in a cluster; none: where it listens
    certificate: Path | None = None  # presented at `tls` addresses
    key: Path | None = None
    devices: str = "auto"
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES
    gpu_memory_bytes: int | None = None  # used of each GPU; None: all
    store_memory_bytes: int | None = None  # for weights; None: a share of the free memory
    host_eviction: str = "lru"  # the rule by which weights leave host memory for the disk
    spill: Path | None = None  # the disk's folder for weights and data; None: they are not spilled
    spill_bytes: int = 64 * GIB  # for weights
    data_memory_bytes: int | None = None  # for data of functions; None: a share of the free memory
    data_disk_bytes: int = 16 * GIB
    secret_file: Path | None = None  # None: credentials are valid for this process's life
    gpu_overlap: int = 1  # leases in force on a GPU at once; its calls run one at a time
    gpu_concurrency: int = 1  # above 1: as many leases, and their calls run at the same time
    # A whole GPU that can be divided is announced as so many slots, each with a lease and an equal
    # share of the compute.
    gpu_slots: int = 1
    # Virtual CPUs of a GPU's leases together. None: an equal part of the machine's where there are
    # several slots, else none.
    gpu_vcpus: int | None = None
    spare_contexts: int | None = None  # wait for models on each kind of GPU; None: as usual
    runtime: str = PROCESS  # of models whose functions do not wish for another
    prepare_at_start: bool = True  # False: workers are prepared when a HELLO announces GPU use
    emulation: EmulatedTimes = field(default_factory=EmulatedTimes)
    leases: LeaseTimes = field(default_factory=LeaseTimes)
    hello_s: float = 5.0  # a new connection has this long to send HELLO
    weights_s: float = 120.0  # a load waits this long for its function to send the weights
    drain_s: float = 5.0  # calls in flight have this long when the manager stops
    metrics: tuple[str, int] | None = None  # host and port of metrics and health checks
