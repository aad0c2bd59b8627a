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

    enabled: bool = False
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
            enabled=_switch(environment, "GPUFAAS_ENABLED", default=False),
            address=environment.get("GPUFAAS_ADDRESS") or None,
            credential=environment.get("GPUFAAS_CREDENTIAL") or None,
            gpu_memory_bytes=_bytes(environment, "GPUFAAS_GPU_MEMORY", DEFAULT_GPU_MEMORY_BYTES),
            gpu_name=environment.get("GPUFAAS_GPU_NAME") or DEFAULT_GPU_NAME,
            tracing=_tracing(environment, "GPUFAAS_TRACING"),
            stats=environment.get("GPUFAAS_STATS") or None,
            capture=_switch(environment, "GPUFAAS_CAPTURE", default=True),
        )


def _switch(environment: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = environment.get(name, "")
    if value not in ("", "0", "1"):
        raise InvalidShimSetting(name, value, "0 or 1")
    return default if value == "" else value == "1"


def _bytes(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, "")
    if value == "":
        return default
    if not value.isascii() or not value.isdecimal() or int(value) == 0:
        raise InvalidShimSetting(name, value, "a positive number of bytes")
    return int(value)


def _tracing(environment: Mapping[str, str], name: str) -> Tracing:
    value = environment.get(name) or "background"
    match value:
        case "background" | "wait":
            return value
        case _:
            raise InvalidShimSetting(name, value, "background or wait")
