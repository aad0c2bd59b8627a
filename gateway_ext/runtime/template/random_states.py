"""The random generators of a fork: fresh ones, unless the handler chose their seed at import.

A process that is started anew draws its seeds from the system. Forks would all draw the same
numbers, so each gets seeds of its own. A generator that the handler has seeded itself begins in
every instance as the handler left it.
"""

import importlib
import random
import sys
from types import ModuleType
from typing import Any

_WORDS, _WORD_BITS = 624, 32  # of the Mersenne twister
_MOST_BLOCKS = 2000


class RandomStates:
    """The states of the generators of `random`, numpy and torch after the handler's import."""

    def __init__(self) -> None:
        """Create this before the handler is imported."""
        self._before = random.getstate()
        self._kept: list[tuple[Any, Any]] = []  # functions, and the states to call them with
        self._drawn: list[Any] = []  # functions that draw a new seed

    def imported(self) -> None:
        """Note which generators the handler has seeded by now."""
        self._kept, self._drawn = [], []
        if _was_seeded(self._before, random.getstate()):
            self._kept.append((random.setstate, random.getstate()))
        else:
            self._drawn.append(random.seed)
        if "numpy.random" in sys.modules:
            self._note_numpy(sys.modules["numpy.random"])
        if "torch" in sys.modules:
            self._note_torch(sys.modules["torch"])

    def begin_anew(self) -> None:
        """Seed or restore every generator, in a fork, or after calls that drew from them."""
        for restore, state in self._kept:
            restore(state)
        for draw in self._drawn:
            draw()

    def _note_numpy(self, numpy_random: ModuleType) -> None:
        # Seeding drops the source that the generator had drawn its first state from.
        if numpy_random.mtrand._rand._bit_generator.seed_seq is None:  # noqa: SLF001 - nothing else tells
            self._kept.append((numpy_random.set_state, numpy_random.get_state()))
        else:
            self._drawn.append(numpy_random.seed)

    def _note_torch(self, torch: ModuleType) -> None:
        if getattr(torch, _FIRST_SEED, None) == torch.initial_seed():
            self._drawn.append(torch.seed)
        else:
            self._kept.append((torch.set_rng_state, torch.get_rng_state()))


_FIRST_SEED = "_gpufaas_first_seed"


def note_torch_seed() -> None:
    """Remember the seed that torch drew at its own import."""
    torch = importlib.import_module("torch")
    setattr(torch, _FIRST_SEED, torch.initial_seed())


def _was_seeded(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Whether the second state cannot be reached from the first by drawing numbers alone."""
    generator = random.Random()
    generator.setstate(before)
    for _ in range(_MOST_BLOCKS):
        if generator.getstate()[1][:-1] == after[1][:-1]:
            return False
        generator.getrandbits(_WORDS * _WORD_BITS)
    return True
