"""One round of a case: the system is started, warmed up, called and ended; answers are checked."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from bench.gateway import bench_functions
from bench.gateway.bench_stacks import call_until_leased, stack_of_builds
from bench.gateway.call_cases import (
    AS_IT_COMES,
    COMPETING_FUNCTIONS,
    GPUS,
    OURS,
    PEERS,
    Answering,
    CallCase,
    CallKind,
    OwnSettings,
)
from bench.gateway.checked_calls import (
    KSERVE_FORM,
    PLAIN_FORM,
    Answer,
    CheckedCalls,
    bodies,
    computing_calls,
    empty_calls,
)
from bench.measure.call_costs import CallCosts, call_costs
from bench.measure.load_figures import LoadFigures, load_for
from bench.measure.peers.peer_servers import PeerProgram, peer_server
from bench.measure.process_usage import process_tree, usage_by_part
from bench.measure.report import MeasurementFailed
from bench.measure.whole_stack import StackNotReady, WholeStack

_SETTLE_S, _WARM_S, _WARM_CLIENTS = 3.0, 1.0, 8
_WORKERS = "gpu-manager's workers"
_PATHS = {
    Answering.RAY: "/",
    Answering.LITSERVE: "/predict",
    Answering.BENTOML: "/predict",
    Answering.MOSEC: "/inference",
    Answering.TRITON: "/v2/models/{program}/infer",
}
_FORMS = {Answering.TRITON: KSERVE_FORM}  # of other systems: the plain one
_PROGRAMS = {CallKind.EMPTY: PeerProgram.NOOP, CallKind.COMPUTING: PeerProgram.COMPUTING}


@dataclass(frozen=True, slots=True)
class Target:
    """A system that is ready; `leases` counts those that were given so far."""

    url: str
    calls: CheckedCalls
    usage: Callable[[], dict[str, float]]
    leases: Callable[[], int] | None = None


def one_round(case: CallCase, seconds: float, tuned: OwnSettings) -> dict[int, CallCosts]:
    """Put every number of clients on a system for these seconds.

    MeasurementFailed if an answer is wrong, or if a GPU call of ours was computed elsewhere.
    """
    found = {}
    with warm_target(case, tuned) as target:
        for clients in case.clients:
            leases = target.leases() if target.leases else 0
            found[clients] = call_costs(partial(_load, target, clients, seconds), target.usage)
            if target.leases and target.leases() <= leases:
                raise MeasurementFailed(f"{case}: no call got a lease")
            if _computes_on_gpu(case) and not found[clients].processor_s.get(_WORKERS):
                raise MeasurementFailed(f"{case}: no worker computed anything")
    return found


@contextmanager
def warm_target(case: CallCase, tuned: OwnSettings) -> Iterator[Target]:
    """The case's system, started and called for a while."""
    own = tuned if case.system is Answering.TUNED else AS_IT_COMES
    with _target(case, own) as target:
        time.sleep(_SETTLE_S)  # until the workers of the pool are made
        _load(target, _WARM_CLIENTS, _WARM_S)
        yield target


def _load(target: Target, clients: int, seconds: float) -> LoadFigures:
    answers: list[Answer] = []
    figures = load_for(
        target.url, target.calls.calls, clients, seconds, lambda *each: answers.append(each)
    )
    target.calls.check(answers)
    return figures


def _computes_on_gpu(case: CallCase) -> bool:
    return case.system in OURS and case.kind in {
        CallKind.COMPUTING,
        CallKind.COMPETING,
    }


@contextmanager
def _target(case: CallCase, own: OwnSettings) -> Iterator[Target]:
    if case.system in PEERS:
        program = _PROGRAMS[case.kind]
        path = _PATHS[case.system].format(program=program)
        form = _FORMS.get(case.system, PLAIN_FORM)
        noop = program is PeerProgram.NOOP
        calls = empty_calls(path, form) if noop else computing_calls({0: path}, form)
        with peer_server(PEERS[case.system], program) as served:
            yield Target(served.url, calls, partial(usage_of_peer, served.pid))
    else:
        devices = f"cpu:{GPUS[case.kind]}"
        overlap = ("--gpu-overlap", str(own.gpu_overlap))
        with stack_of_builds("--devices", devices, "--gpu-memory", "1GiB", *overlap) as running:
            calls = _deploy(running, case.kind, own.instances)
            leases = None if case.kind is CallKind.PLAIN else partial(_leases, running)
            yield Target(running.url, calls, partial(usage_of_stack, running.pid), leases)


def _deploy(running: WholeStack, kind: CallKind, instances: int) -> CheckedCalls:
    if kind is CallKind.PLAIN:
        running.deploy(bench_functions.plain())
        running.ready(bench_functions.PLAIN)
        return empty_calls(f"/function/{bench_functions.PLAIN}")
    if kind is CallKind.EMPTY:
        return _deploy_empty(running)
    seeds = range(COMPETING_FUNCTIONS if kind is CallKind.COMPETING else 1)
    names = {seed: bench_functions.computing_name(seed) for seed in seeds}
    for seed in seeds:
        running.deploy(bench_functions.computing(seed, instances))
    for name in names.values():
        running.ready(name)
        call_until_leased(running, name, bodies()[0])
    return computing_calls({seed: f"/function/{name}" for seed, name in names.items()})


def _deploy_empty(running: WholeStack) -> CheckedCalls:
    name = bench_functions.GPU
    running.deploy(bench_functions.gpu())
    running.ready(name)
    call_until_leased(running, name, bench_functions.WARM)
    before = running.cache()
    running.call(name, b"")
    if not running.cache().since(before).hits:
        raise StackNotReady(f"{name}: a call that does nothing got no lease")
    return empty_calls(f"/function/{name}")


def _leases(running: WholeStack) -> int:
    found = running.cache()
    return found.hits + found.misses


def usage_of_stack(pid: int) -> dict[str, float]:
    """The processor seconds so far of each part of ours."""
    parts = usage_by_part(process_tree(pid))
    return {name: part.processor_s for name, part in parts.items()}


def usage_of_peer(pid: int) -> dict[str, float]:
    """A peer's processes are not told apart."""
    return {"all": sum(each.processor_s for each in process_tree(pid).values())}
