"""Time and chance of a whole process in the hands of a simulation, for as long as one lasts.

The product reads the clock and draws its names where it needs them. Here each of these few
functions is replaced by one that asks the simulation, so that the same code runs in it.
"""

import gc
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import ModuleType

from tests.kit.simulation.simulated_loop import PROGRAM, SimulatedLoop

_EPOCH_S = 1_790_000_000.0  # when every simulation begins
_NS = 1_000_000_000

Replacement = tuple[ModuleType, str, object]


@contextmanager
def interposed(
    loop: SimulatedLoop, chance: Random, more: tuple[Replacement, ...] = ()
) -> Iterator[None]:
    """Time is the loop's, chance is this one; garbage is collected at the end, not by chance.

    `more` are further names to replace, each in the module that uses it.
    """
    replaced = [*_clocks(loop), *_sources(chance), *more]
    before = [(where, name, getattr(where, name)) for where, name, _ in replaced]
    state = random.getstate()
    collects = gc.isenabled()
    gc.disable()
    random.seed(chance.getrandbits(64))
    for where, name, value in replaced:
        setattr(where, name, value)
    try:
        yield
    finally:
        for where, name, value in reversed(before):
            setattr(where, name, value)
        random.setstate(state)
        if collects:
            gc.enable()


def _clocks(loop: SimulatedLoop) -> list[Replacement]:
    def wall_s() -> float:
        program = PROGRAM.get()
        return _EPOCH_S + loop.passed_s + (0.0 if program is None else program.skew_s)

    return [
        (time, "time", wall_s),
        (time, "time_ns", lambda: int(wall_s() * _NS)),
        (time, "monotonic", loop.time),
        (time, "monotonic_ns", lambda: int(loop.time() * _NS)),
        (time, "perf_counter", loop.time),
        (time, "clock_gettime", lambda _: loop.time()),
    ]


def _sources(chance: Random) -> list[Replacement]:
    """The system's chance, of which UUIDs are made, and the names that `secrets` draws."""
    draw: Callable[[int], bytes] = chance.randbytes

    def token_bytes(nbytes: int | None = None) -> bytes:
        return draw(32 if nbytes is None else nbytes)

    return [
        (os, "urandom", draw),
        (random, "_urandom", draw),
        (secrets, "token_bytes", token_bytes),
        (secrets, "token_hex", lambda nbytes=None: token_bytes(nbytes).hex()),
    ]
