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
    """One node: its GPUs, its memory for weights, and where it listens.

    Without a secret file the credentials are valid for the life of this process. In a cluster,
    functions get the addresses `advertise`, or else those where the manager listens; the
    certificate is presented at `tls` addresses. The load of a model waits up to `weights_s` for its
    function to send the weights. Up to `gpu_overlap` leases may be in force on a GPU at once; the
    work of one request at a time runs on it. With a `gpu_concurrency` above 1 so many leases may
    be, and their calls run at the same time. A whole GPU that can be divided is announced as
    `gpu_slots` slots instead, each with a lease and an equal share of the compute; its leases can
    be given `gpu_vcpus` virtual CPUs together (None: an equal part of this machine's where there
    are several slots, else none). So many `spare_contexts` at most wait for models on
    each kind of GPU (None: as many as is usual). `runtime` hosts the models whose functions do not
    wish for another. Data that functions put for each other has `data_memory_bytes`, and on disk,
    if weights are spilled, `data_disk_bytes`. `host_eviction` is the rule by which weights are
    evicted from host memory to disk. Metrics and health checks are served at the host and port
    `metrics`. Workers are prepared for a first
    model at the node's start, or when the first HELLO of a shim says that a GPU may be used soon.
    """

    node: str
    listen: tuple[Address, ...]
    advertise: tuple[Address, ...] = ()
    certificate: Path | None = None
    key: Path | None = None
    devices: str = "auto"
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES
    gpu_memory_bytes: int | None = None
    store_memory_bytes: int | None = None
    host_eviction: str = "lru"
    spill: Path | None = None
    spill_bytes: int = 64 * GIB
    data_memory_bytes: int | None = None
    data_disk_bytes: int = 16 * GIB
    secret_file: Path | None = None
    gpu_overlap: int = 1
    gpu_concurrency: int = 1
    gpu_slots: int = 1
    gpu_vcpus: int | None = None
    spare_contexts: int | None = None
    runtime: str = PROCESS
    prepare_at_start: bool = True
    emulation: EmulatedTimes = field(default_factory=EmulatedTimes)
    leases: LeaseTimes = field(default_factory=LeaseTimes)
    hello_s: float = 5.0
    weights_s: float = 120.0
    drain_s: float = 5.0
    metrics: tuple[str, int] | None = None
