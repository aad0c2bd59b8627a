"""What a person can choose about a GPU manager: one frozen value, built at the entry point."""

from dataclasses import dataclass, field
from pathlib import Path

from common.addresses import Address
from gpu_manager.node.leases_in_force import LeaseTimes

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class EmulatedTimes:
    """What an emulated GPU takes at least for a load, in all and for each GiB, and for a run."""

    load_s: float = 0.0
    load_s_per_gib: float = 0.0
    run_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """One node: its GPUs, its memory for weights, and where it listens.

    Without a secret file the credentials are good for the life of this process. In a cluster,
    functions are told to look for it under `advertise`, or else where it listens; who comes by a
    `tls` address is shown the certificate. A model that was
    placed here waits for `weights_s` until its function has sent its weights. So many leases as
    `gpu_overlap` may be in force on a GPU at once; one request's work at a time runs on it.
    `host_eviction` is the eviction rule by which weights leave host memory for the disk.
    Prometheus and health checks are answered at the host and port `metrics`; at most
    `metric_names` models have metrics of their own.
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
    secret_file: Path | None = None
    gpu_overlap: int = 1
    emulation: EmulatedTimes = field(default_factory=EmulatedTimes)
    leases: LeaseTimes = field(default_factory=LeaseTimes)
    hello_s: float = 5.0
    pressure_s: float = 2.0
    room_s: float = 10.0
    weights_s: float = 120.0
    drain_s: float = 5.0
    metrics: tuple[str, int] | None = None
    metric_names: int = 1_000
