"""The shim's settings: one frozen object per process, read once from the environment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch_shim.errors import InvalidShimSetting

DEFAULT_GPU_MEMORY_BYTES = 80 << 30
DEFAULT_GPU_NAME = "gpufaas GPU"

Tracing = Literal["background", "wait"]


@dataclass(frozen=True, slots=True)
class ShimSettings:
    """The settings of this process's shim."""

    address: str | None = None
    credential: str | None = None
    gpu_memory_bytes: int = DEFAULT_GPU_MEMORY_BYTES
    gpu_name: str = DEFAULT_GPU_NAME
    tracing: Tracing = "background"
    stats: str | None = None  # a path, or the number of an open file descriptor
    capture: bool = True

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "ShimSettings":
        """Read the `GPUFAAS_*` variables; raise InvalidShimSetting for an invalid value."""
        return cls(
            address=environment.get("GPUFAAS_ADDRESS") or None,
            credential=environment.get("GPUFAAS_CREDENTIAL") or None,
            gpu_memory_bytes=_gpu_memory_bytes(environment),
            gpu_name=environment.get("GPUFAAS_GPU_NAME") or DEFAULT_GPU_NAME,
            tracing=_tracing(environment),
            stats=environment.get("GPUFAAS_STATS") or None,
            capture=_capture(environment),
        )


def _capture(environment: Mapping[str, str]) -> bool:
    value = environment.get("GPUFAAS_CAPTURE") or "1"
    if value not in ("0", "1"):
        raise InvalidShimSetting("GPUFAAS_CAPTURE", value, "0 or 1")
    return value == "1"


def _gpu_memory_bytes(environment: Mapping[str, str]) -> int:
    value = environment.get("GPUFAAS_GPU_MEMORY") or str(DEFAULT_GPU_MEMORY_BYTES)
    if not value.isascii() or not value.isdecimal() or int(value) == 0:
        raise InvalidShimSetting("GPUFAAS_GPU_MEMORY", value, "a positive number of bytes")
    return int(value)


def _tracing(environment: Mapping[str, str]) -> Tracing:
    value = environment.get("GPUFAAS_TRACING") or "background"
    if value not in ("background", "wait"):
        raise InvalidShimSetting("GPUFAAS_TRACING", value, "background or wait")
    return "wait" if value == "wait" else "background"
