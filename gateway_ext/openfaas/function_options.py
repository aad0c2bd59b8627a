"""A deployment's options, read from its labels, annotations, environment and limits."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import NamedTuple, TypeVar

from cache_manager import exits
from cache_manager.model.errors import UnknownRule
from common import numerals
from common.gpu_wishes import AS_MEASURED, RUNTIMES, UNMERGED, USUAL, WHOLE, GpuWishes
from gateway_ext.errors import BadDeployment
from gateway_ext.model import Deployment, Resources
from gateway_ext.openfaas import quantities
from scheduler.api import BadValue, OwnerTerms
from scheduler.model.owner_terms import check_number

OURS = "com.gpufaas."
SCALING = "com.openfaas.scale."
TROUBLE = "com.gpufaas.trouble"
TEMPLATE_STATE = "com.gpufaas.template-state"
PATH = "com.gpufaas.path"
# The known keys with our prefix; any other key with our prefix is refused.
_NAMES = """
    enabled model memory batch slo priority retry retries keep timeout workers concurrency queue
    max-wait path trouble template template-state show-errors exit runtime share batch-handler
    batch-wait weight gpu-seconds gpu-window memory-quota leases waiting
"""
KEYS = frozenset(OURS + name for name in _NAMES.split())
GPU_FLAG = "--gpu"  # in the template's fprocess, which arrives as envProcess
GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "intel.com/gpu")
_PROFILE = "com.openfaas.profile"
_TIMEOUTS = ("exec_timeout", "write_timeout", "read_timeout")
_MAX_WAIT = "max_wait"
_TIMEOUT_S = 60.0
_MAX_WAIT_S = 5.0
LONGEST_S = 86_400.0  # of a time in a deployment: clocks, and times in messages, have their ends
_MOST = 5
_NONE: tuple[str, ...] = ()
_ALL_PERCENT = 100
_MOST_DIGITS = 15  # messages to the scheduler carry no number of more than 63 bits
_FINEST_SHARE = 1e-6
_LEAST_TARGET, _LEAST_PROPORTION = 0.001, 0.01  # less counts as this: loads are divided by both
_MOST_BATCH, _MOST_BATCH_WAIT_S = 256, 10.0
_MERGED = {"off": UNMERGED, "default": AS_MEASURED}

_USUAL_TERMS = OwnerTerms()

_Value = TypeVar("_Value")
_Number = TypeVar("_Number", bound=float)


class HandlerBatches(NamedTuple):
    """How calls are given to the function's `handle_batch`."""

    most: int = 0  # 0: the function has a `handle`, for one call
    wait_s: float = 0.0  # how long one waits for others
    repeats: bool = True  # each is made once more, alone, if all of them fail


_SINGLY = HandlerBatches()


@dataclass(frozen=True, slots=True)
class FunctionOptions:
    """What a deployment asks of the gateway, the scaler and the scheduler; no time is above a day.

    A call that is expected to wait for its turn longer than `max_wait_s`, or than half of
    `timeout_s`, is refused at once.
    """

    gpu: bool = False
    models: tuple[str, ...] = ()
    memory_bytes: int | None = None
    slo_s: float | None = None
    priority: int = 0
    retry: bool = False
    retries: int | None = None
    keep: bool = False
    timeout_s: float = _TIMEOUT_S
    scale_min: int = 1
    scale_max: int = _MOST
    scale_factor: int = 20
    scale_zero: bool = False
    scale_zero_after_s: float = 900.0
    scale_target: float = 50.0  # the load of one replica
    scale_type: str = "capacity"  # calls in flight; `rps`: calls a second
    scale_proportion: float = 0.9  # of the target: beyond, another replica starts
    workers: int = 1
    concurrency: int | None = None
    queue: int = 100
    template: bool = True
    max_wait_s: float = _MAX_WAIT_S
    shows_errors: bool = False  # to every caller
    exit_rule: str = ""  # by which its idle models leave; empty: the scheduler's own
    wishes: GpuWishes = USUAL  # for the node's GPU manager
    batches: HandlerBatches = _SINGLY
    terms: OwnerTerms | None = None  # for the scheduler


def of(
    deployment: Deployment,
    default_timeout_s: float = _TIMEOUT_S,
    default_max_wait_s: float = _MAX_WAIT_S,
    *,
    longest_timeout_s: float = LONGEST_S,
    default_shows_errors: bool = False,
) -> FunctionOptions:
    """Raise BadDeployment that names the key and the value that is wrong."""
    _refuse_unknown(deployment)
    read = _AnnotationReader(deployment)
    timeout_s = own_timeout_s(deployment)
    least = read.scaling("min", _from_zero, 1) or 1
    proportion = read.scaling("target-proportion", _proportion, 0.9)
    return FunctionOptions(
        gpu=_uses_gpu(deployment, read),
        models=read.ours("model", _names, _NONE),
        memory_bytes=read.ours("memory", quantities.memory_bytes, None),
        slo_s=read.ours("slo", _a_day_at_most_s, None),
        priority=read.ours("priority", _whole, 0),
        retry=read.ours("retry", _idempotent, False),
        retries=read.ours("retries", _from_zero, None),
        keep=read.ours("keep", _truth, False),
        timeout_s=min(timeout_s, longest_timeout_s) or default_timeout_s,
        workers=read.ours("workers", _from_one, 1),
        concurrency=_concurrency(deployment, read),
        queue=read.ours("queue", _from_zero, 100),
        template=read.ours("template", _truth, True),
        max_wait_s=_max_wait_s(deployment, read, default_max_wait_s),
        shows_errors=read.ours("show-errors", _truth, default_shows_errors),
        exit_rule=read.ours("exit", _exit_rule, ""),
        wishes=GpuWishes(
            read.ours("runtime", _runtime, ""),
            read.ours("share", _gpu_share, WHOLE),
            read.ours("batch", _merged, AS_MEASURED),
        ),
        batches=_batches(read),
        terms=_own_terms(read),
        scale_min=least,
        scale_max=_most(read, least),
        scale_factor=read.scaling("factor", _percent, 20),
        scale_zero=read.scaling("zero", _truth, False),
        scale_zero_after_s=read.scaling("zero-duration", _a_day_at_most_s, 900.0),
        scale_target=read.scaling("target", _target, 50.0),
        scale_type=read.scaling("type", _scale_type, "capacity"),
        scale_proportion=read.scaling("proportion", _proportion, proportion),
    )


def refuse_beyond(deployment: Deployment, largest_bytes: int) -> None:
    """BadDeployment if it asks for more memory than the largest GPU has."""
    read = _AnnotationReader(deployment)
    if (read.ours("memory", quantities.memory_bytes, None) or 0) > largest_bytes:
        amount = read.ours("memory", str, "")
        largest = quantities.shown(largest_bytes)
        raise BadDeployment(f"{OURS}memory: {amount}: the largest GPU has {largest}")


def own_timeout_s(deployment: Deployment) -> float:
    """The time-out that it asks for: by annotation, else by the first variable; 0: none."""
    annotated_s = _AnnotationReader(deployment).ours("timeout", _some_seconds, 0.0)
    variables = (name for name in _TIMEOUTS if deployment.environment.get(name))
    times_s = (_read(name, deployment.environment[name], quantities.seconds) for name in variables)
    return annotated_s or next((time_s for time_s in times_s if time_s > 0), 0.0)


def refuse_longer(deployment: Deployment, longest_timeout_s: float) -> None:
    """BadDeployment if it asks for longer times than it would get."""
    timeout_s = own_timeout_s(deployment)
    if timeout_s > longest_timeout_s:
        raise BadDeployment(
            f"a time-out of {timeout_s:g} s: at most {longest_timeout_s:g} s, by the operator's "
            "longest_timeout_s in the gateway's settings"
        )
    read = _AnnotationReader(deployment)
    for key in (OURS + "slo", OURS + "max-wait", SCALING + "zero-duration"):
        time_s = read.value(key, quantities.seconds, 0.0)
        if time_s > LONGEST_S:
            raise BadDeployment(f"{key}: {time_s:g} s: at most {LONGEST_S:g} s, a day")


# -- the sources of a value ------------------------------------------------------------------------


class _AnnotationReader:
    """Values by key: an annotation takes precedence over a label of the same name."""

    def __init__(self, deployment: Deployment) -> None:
        self._sources = (deployment.annotations, deployment.labels)

    def ours(self, name: str, read: Callable[[str], _Value], usual: _Value) -> _Value:
        return self.value(OURS + name, read, usual)

    def scaling(self, name: str, read: Callable[[str], _Value], usual: _Value) -> _Value:
        return self.value(SCALING + name, read, usual)

    def value(self, key: str, read: Callable[[str], _Value], usual: _Value) -> _Value:
        return next(self.values(key, read), usual)

    def values(self, key: str, read: Callable[[str], _Value]) -> Iterator[_Value]:
        for source in self._sources:
            if key in source:
                yield _read(key, source[key], read)


def _read(key: str, text: str, read: Callable[[str], _Value]) -> _Value:
    try:
        return read(text)
    except ValueError as error:
        raise BadDeployment(f"{key}: {text!r}: {error}") from error


def _refuse_unknown(deployment: Deployment) -> None:
    for key in (*deployment.annotations, *deployment.labels):
        if key.startswith(OURS) and key not in KEYS:
            settable = sorted(KEYS - {TROUBLE, TEMPLATE_STATE})
            names = [key.removeprefix(OURS) for key in settable]
            near = get_close_matches(key.removeprefix(OURS), names, 1)
            meant = f"did you mean {OURS}{near[0]}? " if near else ""
            raise BadDeployment(f"{key} is not known: {meant}known: {', '.join(settable)}")


# -- the options, one by one -----------------------------------------------------------------------


def _uses_gpu(deployment: Deployment, read: _AnnotationReader) -> bool:
    """Whether the function uses a GPU; `enabled: false` overrules every other sign."""
    signs = list(read.values(OURS + "enabled", _truth))
    if signs:
        return all(signs)
    return (
        GPU_FLAG in deployment.process.split()
        or any("gpu" in name.lower() for name in read.value(_PROFILE, _names, _NONE))
        or any(_has_gpu(amount) for amount in (deployment.limits, deployment.requests))
        or any(is_gpu_constraint(constraint) for constraint in deployment.constraints)
    )


def is_gpu_constraint(constraint: str) -> bool:
    """Whether the constraint asks for a machine with a GPU: `nvidia.com/gpu.product=T4`."""
    return constraint.strip().startswith(GPU_RESOURCES)


def _has_gpu(amount: Resources | None) -> bool:
    if amount is None or not amount.gpu:
        return False
    return _read(GPU_RESOURCES[0], amount.gpu, _from_zero) > 0


def _max_wait_s(deployment: Deployment, read: _AnnotationReader, default_s: float) -> float:
    """The annotation, else the variable, else the default; 0 means no bound."""
    found_s = read.ours("max-wait", quantities.seconds, None)
    if found_s is None:
        text = deployment.environment.get(_MAX_WAIT)
        found_s = _read(_MAX_WAIT, text, quantities.seconds) if text else default_s
    return min(found_s, LONGEST_S) or math.inf


def _concurrency(deployment: Deployment, read: _AnnotationReader) -> int | None:
    """Calls that one instance takes at once; 0 means no limit, as in of-watchdog."""
    most = read.ours("concurrency", _from_zero, None)
    if most is None:
        most = _read("max_inflight", deployment.environment.get("max_inflight") or "0", _from_zero)
    return most or None


def _batches(read: _AnnotationReader) -> HandlerBatches:
    most = read.ours("batch-handler", _batch_size, 0)
    wait_s = read.ours("batch-wait", _batch_wait_s, 0.0)
    if wait_s and not most:
        raise BadDeployment(f"{OURS}batch-wait is for functions with {OURS}batch-handler")
    return HandlerBatches(most, wait_s, read.ours("retry", _idempotent, True))


def _most(read: _AnnotationReader, least: int) -> int:
    """The most replicas; a minimum without a maximum may exceed the default maximum."""
    most = read.scaling("max", _from_one, None)
    if most is None:
        return max(least, _MOST)
    if most < least:
        raise BadDeployment(f"{SCALING}max: {str(most)!r}: it is less than {SCALING}min, {least}")
    return most


def _own_terms(read: _AnnotationReader) -> OwnerTerms | None:
    """The share and the quotas that the function asks for itself, within those of its namespace.

    None without such an annotation. Its priority is not among them: each of its requests has that.
    """
    gpu_s = read.ours("gpu-seconds", partial(_within, "gpu_s", quantities.seconds), None)
    window_s = read.ours("gpu-window", partial(_within, "window_s", quantities.seconds), None)
    if window_s is not None and gpu_s is None:
        raise BadDeployment(f"{OURS}gpu-window is for {OURS}gpu-seconds")
    terms = OwnerTerms(
        weight=read.ours("weight", partial(_within, "weight", _number), _USUAL_TERMS.weight),
        gpu_s=gpu_s,
        window_s=_USUAL_TERMS.window_s if window_s is None else window_s,
        resident_bytes=read.ours(
            "memory-quota", partial(_within, "resident_bytes", quantities.memory_bytes), None
        ),
        leases=read.ours("leases", partial(_within, "leases", _short_whole), None),
        waiting=read.ours("waiting", partial(_within, "waiting", _short_whole), None),
    )
    return None if terms == _USUAL_TERMS else terms


# -- values --------------------------------------------------------------------------------------


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _from_zero(text: str) -> int:
    number = numerals.natural(text.strip(), _MOST_DIGITS)
    if number is None:
        raise ValueError(f"a whole number from 0, of {_MOST_DIGITS} digits at most, is expected")
    return number


def _whole(text: str) -> int:
    sign = -1 if text.strip().startswith("-") else 1
    return sign * _from_zero(text.strip().removeprefix("-"))


def _batch_wait_s(text: str) -> float:
    found_s = quantities.seconds(text)
    if found_s > _MOST_BATCH_WAIT_S:
        raise ValueError(f"at most {_MOST_BATCH_WAIT_S:g} s")
    return found_s


def _target(text: str) -> float:
    return max(_LEAST_TARGET, _positive(text))


def _proportion(text: str) -> float:
    proportion = _positive(text)
    if proportion > 1:
        raise ValueError("a number above 0 and up to 1 is expected")
    return max(_LEAST_PROPORTION, proportion)


def _positive(text: str) -> float:
    try:
        number = numerals.number(text.strip())
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise ValueError("a number above 0 is expected")
    return number


def _some_seconds(text: str) -> float:
    found_s = quantities.seconds(text)
    if found_s <= 0:
        raise ValueError("a duration above 0 is expected")
    return found_s


def _a_day_at_most_s(text: str) -> float:
    return min(_some_seconds(text), LONGEST_S)


def _within(field: str, read: Callable[[str], _Number], text: str) -> _Number:
    value = read(text)
    try:
        check_number(field, value)
    except BadValue as error:
        raise ValueError(error.detail) from error
    return value


def _number(text: str) -> float:
    return numerals.number(text.strip())


def _short_whole(text: str) -> int:
    return numerals.whole(text.strip())


def _exit_rule(text: str) -> str:
    rule = text.strip().lower()
    try:
        exits.make(rule)
    except UnknownRule as error:
        raise ValueError(str(error)) from error
    return rule


def _merged(text: str) -> int:
    """The most calls that run as one: `off`, a number, or `default`."""
    most = _MERGED.get(text.strip().lower())
    try:
        return _from_one(text) if most is None else most
    except ValueError as error:
        raise ValueError("`off`, `default` or a number from 1 is expected") from error


def _gpu_share(text: str) -> float:
    """A share as `0.25` or `25%`; a millionth is the finest."""
    number = text.strip()
    try:
        share = numerals.number(number.removesuffix("%").strip()) / (
            _ALL_PERCENT if number.endswith("%") else 1
        )
    except ValueError:
        share = 0.0
    if not _FINEST_SHARE <= share <= WHOLE:
        raise ValueError("a share of a GPU is expected: above 0 and up to 1, or a percentage")
    return share


def _word(meanings: Mapping[str, _Value], expected: str) -> Callable[[str], _Value]:
    """Reads one of some words, in any case."""

    def read(text: str) -> _Value:
        word = text.strip().lower()
        if word not in meanings:
            raise ValueError(f"{expected} is expected")
        return meanings[word]

    return read


def _between(least: int, most: int, expected: str) -> Callable[[str], int]:
    """Reads a whole number within bounds."""

    def read(text: str) -> int:
        number = _from_zero(text)
        if not least <= number <= most:
            raise ValueError(f"{expected} is expected")
        return number

    return read


# A truth value as Go reads it, or in everyday words.
_truth = _word(
    {
        **dict.fromkeys(("true", "t", "1", "yes", "on"), True),
        **dict.fromkeys(("false", "f", "0", "no", "off"), False),
    },
    "true or false",
)
_idempotent = _word(
    {
        **dict.fromkeys(("idempotent", "true"), True),
        **dict.fromkeys(("", "never", "no", "false"), False),
    },
    "`idempotent` or `never`",
)
_runtime = _word({name: name for name in RUNTIMES}, " or ".join(RUNTIMES))
_scale_type = _word({"capacity": "capacity", "rps": "rps"}, "`capacity` or `rps`")
_from_one = _between(1, 10**_MOST_DIGITS, "a whole number from 1")
_batch_size = _between(1, _MOST_BATCH, f"a number from 1 to {_MOST_BATCH}")
_percent = _between(0, _ALL_PERCENT, "a percentage from 0 to 100")
