"""Every parser of what others wrote keeps its contract, for what was kept and what is made here."""

import random

import pytest

from hunt.parsers.hostile_inputs import hostile_inputs
from hunt.parsers.input_mutations import Mutations
from hunt.parsers.kept_inputs import CORPUS, REGRESSIONS, kept_of
from hunt.parsers.parser_target import Fault, Target, fault_of, fault_of_memory
from hunt.parsers.registry import all_targets

_CHANGED_INPUTS = 25  # `make fuzz-parsers` has a minute of them for each
_MEASURED_EVERY = 16

TARGETS = all_targets()
pytestmark = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


def faults(target: Target, inputs: list[bytes]) -> list[tuple[Fault, bytes]]:
    """What is wrong, each with the first 200 bytes of its input."""
    found = []
    for number, data in enumerate(inputs):
        fault = fault_of(target, data)
        if fault is None and number % _MEASURED_EVERY == 0:
            fault = fault_of_memory(target, data)
        if fault is not None:
            found.append((fault, data[:200]))
    return found


def test_first_seed_is_taken_and_no_seed_breaks_anything(target: Target) -> None:
    target.parse(target.seeds()[0])

    assert not faults(target, list(target.seeds()))


def test_what_was_kept_breaks_nothing(target: Target) -> None:
    kept = kept_of(CORPUS).get(target.name, []) + kept_of(REGRESSIONS).get(target.name, [])

    assert not faults(target, kept)


def test_hostile_inputs_break_nothing(target: Target) -> None:
    assert not faults(target, list(hostile_inputs(target)))


def test_changed_inputs_break_nothing(target: Target) -> None:
    chance = random.Random(target.name)
    mutations = Mutations(target.form, chance, target.most_bytes)
    known = [*target.seeds(), *kept_of(CORPUS).get(target.name, [])]
    for data in known:
        mutations.show(data)
    changed = [
        mutations.changed(chance.choice(known), chance.choice(known))
        for _ in range(_CHANGED_INPUTS)
    ]

    assert not faults(target, changed)
