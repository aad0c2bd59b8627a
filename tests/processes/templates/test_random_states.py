"""What a fork draws: its own numbers, or those that the handler has chosen by a seed."""

import json
import subprocess
import sys

import pytest

from tests.kit.places import ROOT

_PROGRAM = """
import json, os, sys
sys.path.insert(0, {root!r})
from gateway_ext.runtime.template.forks import RandomStates, note_torch_seed
states = RandomStates()
import random
import numpy as np
import torch
note_torch_seed()
{handler}
states.imported()
drawn = []
for _ in range(2):
    read, write = os.pipe()
    if not os.fork():
        states.begin_anew()
        found = [random.random(), np.random.random(), float(torch.rand(1, dtype=torch.float64))]
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    drawn.append(json.loads(os.read(read, 1000)))
    os.wait()
found = [random.random(), np.random.random(), float(torch.rand(1, dtype=torch.float64))]
print(json.dumps([found, *drawn]))
"""
_SEEDED = {
    0: "random.seed(1)",
    1: "np.random.seed(1)",
    2: "torch.manual_seed(1)",
}


def drawn(handler: str) -> list[list[float]]:
    """What the template would draw, and what each of two forks draws, of the three generators."""
    program = _PROGRAM.format(root=str(ROOT), handler=handler)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    found: list[list[float]] = json.loads(done.stdout)
    return found


def test_forks_draw_numbers_of_their_own_when_nothing_was_seeded() -> None:
    template, first, second = drawn(
        "random.random(), np.random.random(), torch.rand(3), random.sample(range(9000), 9000)"
    )
    for number in range(3):
        assert len({template[number], first[number], second[number]}) == 3


@pytest.mark.parametrize("which", _SEEDED)
def test_forks_begin_as_the_handler_left_a_generator_that_it_has_seeded(which: int) -> None:
    template, first, second = drawn(f"{_SEEDED[which]}; random.random()")
    for number in range(3):
        values = {template[number], first[number], second[number]}
        assert len(values) == (1 if number == which else 3)
