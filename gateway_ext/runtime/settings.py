"""The runtime's settings: one frozen object, read once from the environment."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway_ext.runtime.handler_module import HandlerErrors

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PLAIN = re.compile(r"\d+\.?\d*|\.\d+", re.ASCII)
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)", re.ASCII)

_ERRORS = HandlerErrors("function")


class BadRuntimeSetting(ValueError):
    """An environment variable has an invalid value."""

    def __init__(self, name: str, value: str, wanted: str) -> None:
        super().__init__(f"{name} is {value!r}, not {wanted}")


@dataclass(frozen=True)
class RuntimeSettings:
    """What to serve, where, and within which limits; a time of 0 is no limit."""

    listen: str = "tcp:0.0.0.0:8080"
    handler: str = "function"
    workers: int = 1
    threads: int = 8
    exec_timeout_s: float = 0.0
    read_timeout_s: float = 0.0
    stop_timeout_s: float = 60.0
    max_inflight: int = 0
    max_body_bytes: int = 1 << 30
    hostname: str = "localhost"
    gpu: bool = False
    log_json: bool = False
    errors: HandlerErrors = _ERRORS

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "RuntimeSettings":
        """Reads GPUFAAS_* and OpenFaaS's own names; a bad value raises BadRuntimeSetting."""
        return cls(
            listen=environment.get("GPUFAAS_LISTEN")
            or f"tcp:0.0.0.0:{count_in(environment, 'PORT', 8080)}",
            handler=environment.get("GPUFAAS_HANDLER") or "function",
            workers=count_in(environment, "GPUFAAS_WORKERS", 1),
            threads=count_in(environment, "GPUFAAS_THREADS", 8),
            exec_timeout_s=time_in_s(environment, "exec_timeout", 0.0),
            read_timeout_s=time_in_s(environment, "read_timeout", 0.0),
            stop_timeout_s=time_in_s(environment, "write_timeout", 60.0) or math.inf,
            max_inflight=count_in(environment, "max_inflight", 0, least=0),
            max_body_bytes=count_in(environment, "GPUFAAS_MAX_BODY_BYTES", 1 << 30),
            hostname=environment.get("HOSTNAME") or "localhost",
            gpu=environment.get("GPUFAAS_ENABLED") == "1",
            log_json=environment.get("GPUFAAS_LOG_FORMAT") == "json",
            errors=HandlerErrors(
                str(Path(environment.get("GPUFAAS_HANDLER") or "function").absolute()),
                shows_text=environment.get("GPUFAAS_SHOW_ERRORS") == "1",
                log_command=environment.get("GPUFAAS_LOG_COMMAND", ""),
            ),
        )


def count_in(environment: Mapping[str, str], name: str, default: int, *, least: int = 1) -> int:
    """The number of a variable; BadRuntimeSetting if it is none, or too small."""
    value = environment.get(name, "")
    if value == "":
        return default
    if not value.isascii() or not value.isdecimal() or int(value) < least:
        raise BadRuntimeSetting(name, value, f"a whole number from {least} on")
    return int(value)


def time_in_s(environment: Mapping[str, str], name: str, default: float) -> float:
    """The seconds of a variable: a number, or a duration as Go writes it."""
    value = environment.get(name, "").strip().replace("\N{GREEK SMALL LETTER MU}", "µ")
    if value == "":
        return default
    if _PLAIN.fullmatch(value):
        return float(value)
    if _PART.sub("", value):
        raise BadRuntimeSetting(name, value, "seconds, nor a duration such as 1m30s")
    return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(value))
