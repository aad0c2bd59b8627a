"""The shim's settings: one frozen object per process, read once from the environment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

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
            tracing=_one_of(environment, "GPUFAAS_TRACING", get_args(Tracing)),
            stats=environment.get("GPUFAAS_STATS") or None,
            capture=_one_of(environment, "GPUFAAS_CAPTURE", ("1", "0")) == "1",
        )


def _gpu_memory_bytes(environment: Mapping[str, str]) -> int:
    value = environment.get("GPUFAAS_GPU_MEMORY") or str(DEFAULT_GPU_MEMORY_BYTES)
    if not value.isascii() or not value.isdecimal() or int(value) == 0:
        raise InvalidShimSetting("GPUFAAS_GPU_MEMORY", value, "a positive number of bytes")
    return int(value)


def _one_of(environment: Mapping[str, str], name: str, values: tuple[Any, ...]) -> Any:
    """Return the variable's value, the first of those that it may have if it is not set."""
    value = environment.get(name) or values[0]
    if value not in values:
        raise InvalidShimSetting(name, value, " or ".join(sorted(values)))
    return value
