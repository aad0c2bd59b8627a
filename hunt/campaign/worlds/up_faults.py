"""What can be done to `gpufaas up`."""

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from random import Random

from hunt.campaign.worlds.up_world import UpWorld
from hunt.campaign.worlds.world import EVERYBODY, NOBODY, STREAMS, Fault, Heal, healed
from tests.kit.processes.stopped_process import stop
from tests.kit.stacks.stack import kill

Pids = Callable[[UpWorld, Random], list[int]]

_FROZEN_S = ((0.5, 1.0), (2.5, 4.5))  # shorter and longer than the 2 s until it is noticed
_FULL_S = ((2.0, 4.0),)
_PRESSED_S = ((2.0, 5.0),)
_JUMPED_S = ((2.0, 4.0),)
_JUMPS_S = (60.0, 3_600.0, 86_400.0)
_DISKS = ("queue", "etcd", "spill")
_CALLED = ("echo", "adder", "ticker")


def faults() -> list[Fault[UpWorld]]:
    """All of them."""
    found = []
    for name, pids, breaks in (
        ("gateway", _part("gateway"), EVERYBODY),
        ("scheduler", _part("scheduler"), NOBODY),
        ("etcd", _part("etcd"), NOBODY),
        ("manager", _part("gpu-manager"), STREAMS),
        ("worker", _workers, NOBODY),
        ("function", _instances, STREAMS),
    ):
        found.append(Fault(f"{name}-kill", partial(_killed, pids), breaks=breaks))
        found.append(Fault(f"{name}-stop", partial(_frozen, pids), _FROZEN_S, breaks))
    found += [Fault(f"{disk}-full", partial(_full, disk), _FULL_S) for disk in _DISKS]
    found += [
        Fault("clock-forward", partial(_jumped, 1), _JUMPED_S),
        Fault("clock-back", partial(_jumped, -1), _JUMPED_S),
        Fault("etcd-wiped", _wiped),
        # Whom the kernel ends may be anybody.
        Fault("memory-pressure", _pressed, _PRESSED_S, EVERYBODY),
    ]
    return found


def _part(name: str) -> Pids:
    return lambda world, _: world.pids(name)


def _workers(world: UpWorld, rng: Random) -> list[int]:
    found = world.stack.workers()
    return [rng.choice(found)] if found else []


def _instances(world: UpWorld, rng: Random) -> list[int]:
    return world.stack.instances(rng.choice(_CALLED))


def _killed(pids: Pids, world: UpWorld, rng: Random) -> Heal:
    for pid in _some(pids(world, rng)):
        kill(pid)
    return healed


def _frozen(pids: Pids, world: UpWorld, rng: Random) -> Heal:
    chosen = _some(pids(world, rng))
    for pid in chosen:
        stop(pid)

    def thaw() -> None:
        for pid in chosen:
            with suppress(ProcessLookupError):  # whoever noticed has killed it
                os.kill(pid, signal.SIGCONT)

    return thaw


def _full(disk: str, world: UpWorld, _: Random) -> Heal:
    world.disks[disk].fill()
    return world.disks[disk].empty


def _jumped(direction: int, world: UpWorld, rng: Random) -> Heal:
    """One machine has one clock: all parts jump together, and back together."""
    world.clock.jump(direction * rng.choice(_JUMPS_S))
    return partial(world.clock.jump, 0)


def _wiped(world: UpWorld, _: Random) -> Heal:
    """It must not be started again before its data are gone, nor write while they go."""
    pids = _some(world.pids("etcd"))
    for pid in pids:
        stop(pid)
    shutil.rmtree(world.disks["etcd"].folder / "data")
    for pid in pids:
        kill(pid)
    return healed


def _pressed(world: UpWorld, _: Random) -> Heal:
    world.memory.press()
    return world.memory.release


def _some(pids: Sequence[int]) -> Sequence[int]:
    assert pids, "there is no such process"
    return pids
