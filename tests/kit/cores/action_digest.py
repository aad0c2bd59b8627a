"""Prints one digest of every action in random lives under every policy: see test_replay.py."""

import sys
from hashlib import sha256
from random import Random

from scheduler import policies
from scheduler.composition import make_core
from tests.kit.cores.core_world import World
from tests.kit.cores.random_lives import LEAVING, Chaos, random_operations


def lived(policy: str, seed: int, count: int) -> World:
    """A world after a random life."""
    world = World(make_core(policy, settings=LEAVING))
    chaos = Chaos(world)
    for event in chaos.setup():
        world.send(event)
    for operation in random_operations(Random(seed), count):
        happened = chaos.event(operation)
        if happened is not None:
            world.send(happened)
    return world


if __name__ == "__main__":
    answers = [lived(policy, 7, 1200).answers for policy in policies.available()]
    sys.stdout.write(sha256(repr(answers).encode()).hexdigest())
