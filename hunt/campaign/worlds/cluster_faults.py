"""What can be done to the cluster: to its processes, links, clocks, and to one node for an hour."""

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from random import Random

from hunt.campaign.judging.call_journal import Kind
from hunt.campaign.worlds.cluster_world import GATEWAY, ClusterWorld
from hunt.campaign.worlds.process_holdings import role
from hunt.campaign.worlds.world import EVERYBODY, NOBODY, STREAMS, Fault, Heal, healed
from scheduler.store.stored_records import GPUS
from tests.kit.network.networks import HERE
from tests.kit.processes.daemons import Daemon
from tests.kit.processes.live_cluster import ETCD, NODES, freeze, thaw
from tests.kit.processes.stopped_process import stop
from tests.kit.stacks.stack import children, kill
from tests.kit.waiting import wait_until

Chosen = Callable[[ClusterWorld, Random], str]
Link = tuple[Chosen, Chosen]

_FROZEN_S = ((0.5, 4.5),)
# Mostly shorter, at times longer than the 10 s after which a silent node is given up.
_CUT_S = ((1.5, 4.0), (1.5, 4.0), (1.5, 4.0), (10.5, 12.5))
_JUMPED_S = ((2.0, 4.0),)
_JUMPS_S = (60.0, 3_600.0, 86_400.0)
_AN_HOUR_S = 3_600.0
_FORGOTTEN_S = 100.0  # a node that is given up is forgotten in etcd after 60 s more


def faults() -> list[Fault[ClusterWorld]]:
    """All of them."""
    found = []
    for name, chosen, breaks in (
        ("leader", _leader, NOBODY),
        ("standby", _standby, NOBODY),
        ("etcd", _etcd, NOBODY),
        ("manager", _node, STREAMS),
        ("gateway", _gateway, EVERYBODY),
    ):
        found.append(Fault(f"{name}-kill", partial(_killed, chosen), breaks=breaks))
        found.append(Fault(f"{name}-stop", partial(_frozen, chosen), _FROZEN_S, breaks))
    for name, (one, other), breaks in _LINKS:
        found.append(Fault(f"cut-{name}", partial(_cut, one, other), _CUT_S, breaks))
        found.append(Fault(f"half-{name}", partial(_half_open, one, other), _CUT_S, breaks))
    found += [Fault(f"slow-{name}", partial(_slow, host), _CUT_S) for name, host in _HOSTS]
    found += [
        Fault("worker-kill", _worker_killed),
        Fault("worker-stop", _worker_frozen, _FROZEN_S),
        Fault("function-kill", _function_killed, breaks=STREAMS),
        Fault("function-stop", _function_frozen, _FROZEN_S, STREAMS),
        Fault("clock-forward", partial(_jumped, 1), _JUMPED_S),
        Fault("clock-back", partial(_jumped, -1), _JUMPED_S),
        Fault("etcd-wiped", _wiped),
        Fault("node-gone-an-hour", _gone, breaks=STREAMS),
    ]
    return found


def _leader(world: ClusterWorld, _: Random) -> str:
    return world.cluster.leader()


def _standby(world: ClusterWorld, _: Random) -> str:
    return world.cluster.other(world.cluster.leader())


def _etcd(_: ClusterWorld, __: Random) -> str:
    return ETCD


def _gateway(_: ClusterWorld, __: Random) -> str:
    return GATEWAY


def _node(_: ClusterWorld, rng: Random) -> str:
    return rng.choice(NODES)


def _us(_: ClusterWorld, __: Random) -> str:
    return HERE


# Functions are on the gateway's host, so that its link to a node is theirs as well.
_LINKS: tuple[tuple[str, Link, frozenset[Kind]], ...] = (
    ("leader-etcd", (_leader, _etcd), NOBODY),
    ("standby-etcd", (_standby, _etcd), NOBODY),
    ("leader-standby", (_leader, _standby), NOBODY),
    ("leader-node", (_leader, _node), NOBODY),
    ("gateway-leader", (_gateway, _leader), NOBODY),
    ("function-node", (_gateway, _node), STREAMS),
    ("caller-gateway", (_us, _gateway), EVERYBODY),
)
_HOSTS = (("leader", _leader), ("etcd", _etcd), ("node", _node), ("gateway", _gateway))


def _killed(chosen: Chosen, world: ClusterWorld, rng: Random) -> Heal:
    world.daemons[chosen(world, rng)].kill()
    return healed


def _frozen(chosen: Chosen, world: ClusterWorld, rng: Random) -> Heal:
    daemon: Daemon = world.daemons[chosen(world, rng)]
    freeze(daemon)
    return partial(thaw, daemon)


def _cut(one: Chosen, other: Chosen, world: ClusterWorld, rng: Random) -> Heal:
    world.net.cut(one(world, rng), other(world, rng))
    return world.net.heal


def _half_open(one: Chosen, other: Chosen, world: ClusterWorld, rng: Random) -> Heal:
    """Packets of one of the two arrive at the other one, whose packets do not."""
    pair = [one(world, rng), other(world, rng)]
    rng.shuffle(pair)
    world.net.cut_one_way(*pair)
    return world.net.heal


def _slow(chosen: Chosen, world: ClusterWorld, rng: Random) -> Heal:
    world.net.slow(chosen(world, rng))
    return world.net.heal


def _worker(world: ClusterWorld, rng: Random) -> int:
    servers = [pid for node in NODES for pid in children(world.daemons[node].pid)]
    return _one_of([worker for server in servers for worker in children(server)], rng)


def _one_of(pids: Sequence[int], rng: Random) -> int:
    assert pids, "there is no such process"
    return rng.choice(pids)


def _worker_killed(world: ClusterWorld, rng: Random) -> Heal:
    kill(_worker(world, rng))
    return healed


def _worker_frozen(world: ClusterWorld, rng: Random) -> Heal:
    return _stopped(_worker(world, rng))


def _function(world: ClusterWorld, rng: Random) -> int:
    """An instance, or the template that instances are forked from."""
    processes = world.processes()
    runtimes = [pid for pid, said in sorted(processes.items()) if role(said) == "runtime"]
    return _one_of(runtimes, rng)


def _function_killed(world: ClusterWorld, rng: Random) -> Heal:
    kill(_function(world, rng))
    return healed


def _function_frozen(world: ClusterWorld, rng: Random) -> Heal:
    return _stopped(_function(world, rng))


def _stopped(pid: int) -> Heal:
    stop(pid)

    def go_on() -> None:
        with suppress(ProcessLookupError):  # whoever noticed has killed it
            os.kill(pid, signal.SIGCONT)

    return go_on


def _jumped(direction: int, world: ClusterWorld, rng: Random) -> Heal:
    """One host's clock; that of etcd cannot be shifted."""
    host = rng.choice(sorted(world.net.clocks.keys() - {ETCD}))
    world.net.clocks[host].jump(direction * rng.choice(_JUMPS_S))
    return partial(world.net.clocks[host].jump, 0)


def _wiped(world: ClusterWorld, _: Random) -> Heal:
    world.cluster.etcd.kill()
    shutil.rmtree(world.folder / "etcd")
    return healed


def _gone(world: ClusterWorld, rng: Random) -> Heal:
    """A node is cut off from everybody until it is forgotten; meanwhile an hour passes for all.

    The hour is that of the wall clocks. No limit of time is longer than that after which etcd's
    keys of a node are deleted, and that is waited for.
    """
    node = rng.choice(NODES)
    world.net.cut(node)
    for clock in world.net.clocks.values():
        clock.pass_time(_AN_HOUR_S)

    def forgotten() -> bool:
        return not any(key.startswith(f"{GPUS}{node}") for key in world.cluster.stored(GPUS))

    try:
        wait_until(forgotten, f"{node} is forgotten", within_s=_FORGOTTEN_S)
    except BaseException:
        world.net.heal()
        raise
    return world.net.heal
