"""A parser as its tests and its fuzz see it: what it reads, what it may raise, what it may cost."""

import time
import traceback
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from tests.kit.places import ROOT

_SHOWN = 300
# What the interpreter itself may allocate during a call, whatever the input is.
_BASE_BYTES = 1 << 20


class InputForm(Enum):
    """How inputs are changed: as trees of values, as lines of text, or byte by byte."""

    JSON = "JSON"
    MSGPACK = "msgpack"
    FRAME = "frame of the shim's protocol"
    TEXT = "text"
    BINARY = "bytes"


class Fault(NamedTuple):
    """A way in which a parser breaks its contract, and the line of ours where it shows."""

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True, slots=True)
class Target:
    """One parser, and its contract.

    It returns, or raises one of its `refusals`; nothing else leaves it. It takes at most
    `memory_factor` bytes of memory for each byte of its input and `memory_bytes` beside them, and
    `cpu_s` for an input of `most_bytes`, the largest that is tried. What it returned and `encode`
    encodes, it reads back as the same value. `reads` are the modules whose parsing this covers;
    `sender` and `bound` are for people: who writes such inputs, and what bounds them.
    """

    name: str
    parse: Callable[[bytes], Any]
    refusals: tuple[type[BaseException], ...]
    seeds: Callable[[], Sequence[bytes]]
    form: InputForm
    reads: tuple[str, ...]
    sender: str
    bound: str
    encode: Callable[[Any], bytes] | None = None
    memory_factor: int = 100
    memory_bytes: int = _BASE_BYTES
    most_bytes: int = 64 << 10
    cpu_s: float = 1.0


def fault_of(target: Target, data: bytes) -> Fault | None:
    """What is wrong with how the parser takes this input; None if its contract holds."""
    try:
        value = target.parse(data)
    except target.refusals:
        return None
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        return _raised(error, "")
    if target.encode is None:
        return None
    try:
        back = target.parse(target.encode(value))
    except BaseException as error:  # noqa: BLE001 - as above
        return _raised(error, "on the way back: ")
    if back == value or repr(back) == repr(value):  # of a number that is none
        return None
    what = f"{_cut(repr(value))} comes back as {_cut(repr(back))}"
    return Fault(what, f"the encoder of {target.name}")


def fault_of_memory(target: Target, data: bytes) -> Fault | None:
    """What is wrong with how much memory the parser takes for this input."""
    tracemalloc.start()
    try:
        fault_of(target, data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    most_bytes = target.memory_bytes + target.memory_factor * len(data)
    if peak_bytes <= most_bytes:
        return None
    what = f"{peak_bytes} bytes of memory for {len(data)} bytes, where {most_bytes} are the most"
    return Fault(what, f"the memory of {target.name}")


def fault_of_time(target: Target, data: bytes) -> Fault | None:
    """What is wrong with how long the parser computes for this input."""
    begun_s = time.thread_time()
    fault_of(target, data)
    took_s = time.thread_time() - begun_s
    if took_s <= target.cpu_s:
        return None
    what = f"{took_s:.1f} s of processor time for {len(data)} bytes"
    return Fault(what, f"the time of {target.name}")


def _raised(error: BaseException, when: str) -> Fault:
    if isinstance(error, KeyboardInterrupt):
        raise error
    ours = [
        f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename.startswith(f"{ROOT}/") and "/site-packages/" not in frame.filename
    ]
    product = [place for place in ours if not place.startswith(("hunt/", "tests/"))]
    where = (product or ours or ["nowhere of ours"])[-1]
    return Fault(f"{when}{type(error).__name__}: {_cut(str(error))}", where)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
