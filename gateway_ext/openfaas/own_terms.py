"""The share and the quotas that a function asks for itself, within those of its namespace."""

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from common import numerals
from gateway_ext.errors import BadDeployment
from gateway_ext.openfaas import durations, quantities
from scheduler.api import BadValue, OwnerTerms
from scheduler.model.terms_bounds import check_number

# The annotations, without their prefix.
WEIGHT, GPU_SECONDS, GPU_WINDOW = "weight", "gpu-seconds", "gpu-window"
MEMORY, LEASES, WAITING = "memory-quota", "leases", "waiting"
NAMES = (WEIGHT, GPU_SECONDS, GPU_WINDOW, MEMORY, LEASES, WAITING)
_USUAL = OwnerTerms()

_Value = TypeVar("_Value")
_Number = TypeVar("_Number", bound=float)


class AnnotationSource(Protocol):
    """The annotations of one deployment."""

    def ours(self, name: str, read: Callable[[str], _Value], usual: _Value) -> _Value:
        """The value of this annotation; BadDeployment names it if it cannot be read."""
        ...


def own_terms(read: AnnotationSource) -> OwnerTerms | None:
    """The function's own terms; None if it has no such annotation.

    Its priority is not among them: each of its requests carries that.
    """
    gpu_s = read.ours(GPU_SECONDS, partial(_within, "gpu_s", durations.seconds), None)
    window_s = read.ours(GPU_WINDOW, partial(_within, "window_s", durations.seconds), None)
    if window_s is not None and gpu_s is None:
        raise BadDeployment(f"com.gpufaas.{GPU_WINDOW} is for com.gpufaas.{GPU_SECONDS}")
    terms = OwnerTerms(
        weight=read.ours(WEIGHT, partial(_within, "weight", _number), _USUAL.weight),
        gpu_s=gpu_s,
        window_s=_USUAL.window_s if window_s is None else window_s,
        resident_bytes=read.ours(
            MEMORY, partial(_within, "resident_bytes", quantities.memory_bytes), None
        ),
        leases=read.ours(LEASES, partial(_within, "leases", _whole), None),
        waiting=read.ours(WAITING, partial(_within, "waiting", _whole), None),
    )
    return None if terms == _USUAL else terms


def _within(field: str, read: Callable[[str], _Number], text: str) -> _Number:
    """The value, within the bounds of this field of the terms."""
    found = read(text)
    try:
        check_number(field, found)
    except BadValue as error:
        raise ValueError(error.detail) from error
    return found


def _number(text: str) -> float:
    return numerals.number(text.strip())


def _whole(text: str) -> int:
    return numerals.whole(text.strip())
