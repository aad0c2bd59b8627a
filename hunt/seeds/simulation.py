"""Runs one seed: builds the cluster of its scenario, lets it live, and judges it."""

import asyncio
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from gateway_ext.jobs import worker as job_worker
from gateway_ext.jobs.sqlite import queue as sqlite_queue
from hunt.seeds.event_journal import EventJournal, JournalLogs
from hunt.seeds.faults import Faults
from hunt.seeds.machines import Machine, Runnable
from hunt.seeds.programs.callers import CallersProgram
from hunt.seeds.programs.function_program import FunctionProgram
from hunt.seeds.programs.gateway_program import GatewayProgram
from hunt.seeds.programs.node_program import NodeProgram
from hunt.seeds.programs.operator_program import OperatorProgram
from hunt.seeds.programs.scheduler_program import SchedulerProgram, term_at
from hunt.seeds.programs.service_probe import ServiceProbe
from hunt.seeds.scenarios.fault_plan import ETCD, NATS, Fault, FaultKind
from hunt.seeds.scenarios.scenario import Scenario, scenario_of
from hunt.seeds.shared_queue import SHARED_QUEUE
from hunt.seeds.surroundings import Surroundings
from hunt.seeds.verdicts import Verdicts
from scheduler.service import scheduler_service
from scheduler.service.leadership import election
from tests.kit.simulation.interposed import Replacement, interposed
from tests.kit.simulation.job_disk import SimulatedCommitter
from tests.kit.simulation.simulated_etcd import SimulatedEtcd
from tests.kit.simulation.simulated_loop import PROGRAM, SimulatedProgram, bury, last_words_ignored
from tests.kit.simulation.simulated_nats import SimulatedNats
from tests.kit.simulation.simulated_network import Network, NetworkedLoop
from tests.kit.simulation.simulated_session import SimulatedSession

_LOOK_S = 0.5
# What gateways write to disk is synced, which only a disk in memory does at once.
_FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None
# After the last fault: until every function answers through every gateway, until every call has
# ended and every job is done, and until nothing is left: a lease that nobody claims, and a load for
# which nobody sends the weights, are given up after two minutes.
_BACK_S, _DONE_S, _REST_S = 30.0, 150.0, 150.0


@dataclass(frozen=True, slots=True)
class SeedOutcome:
    """What came of a seed; `back_s` is how long after the last fault all was served again, of
    which `last_back` came last.
    """

    seed: int
    violations: tuple[str, ...]
    last: tuple[str, ...]
    digest: str
    events: int
    calls: int
    answered: int
    back_s: float
    last_back: str
    virtual_s: float

    @classmethod
    def without(cls, seed: int, wrong: str) -> "SeedOutcome":
        """Of a seed that had to be given up."""
        return cls(seed, (wrong,), (), "", 0, 0, 0, 0.0, "", 0.0)


def run_seed(
    seed: int,
    *,
    faults: tuple[Fault, ...] | None = None,
    show: Callable[[str], None] | None = None,
) -> SeedOutcome:
    """Run the scenario of this seed, or the same one with these faults only.

    `show` takes every line of the journal as it comes, logs included.
    """
    scenario = scenario_of(seed)
    if faults is not None:
        scenario = replace(scenario, faults=faults)
    return run_scenario(scenario, show=show)


def run_scenario(scenario: Scenario, *, show: Callable[[str], None] | None = None) -> SeedOutcome:
    """Run this scenario, with the chance of its seed."""
    gc.freeze()  # what was there before is no garbage of this seed
    try:
        with last_words_ignored():
            outcome = _outcome_of(scenario, show)
            gc.collect()
    finally:
        gc.unfreeze()
    return outcome


def _outcome_of(scenario: Scenario, show: Callable[[str], None] | None) -> SeedOutcome:
    seed = scenario.seed
    chance = Random(f"run {seed}")
    loop = NetworkedLoop()
    journal = EventJournal(loop, show)
    loop.network = Network(loop, chance, scenario.latency_s)
    etcd, nats = SimulatedEtcd(loop.network, ETCD), SimulatedNats(NATS)
    with TemporaryDirectory(prefix="gpufaas-seed-", dir=_FAST) as folder:
        around = Surroundings(
            loop, scenario, chance, loop.network, etcd, nats, journal, Path(folder)
        )
        simulation = _Simulation(around)
        end = _run(simulation, around, everything=show is not None)
    return SeedOutcome(
        seed=seed,
        violations=tuple(journal.violations),
        last=tuple(journal.last),
        digest=journal.digest(end),
        events=journal.count,
        calls=len(simulation.callers.calls),
        answered=sum(each.status in (200, 202) for each in simulation.callers.calls.values()),
        back_s=simulation.back_s,
        last_back=simulation.probe.last,
        virtual_s=loop.passed_s,
    )


def _run(simulation: "_Simulation", around: Surroundings, *, everything: bool) -> str:
    """Run it to its end; a text that two runs share only if they drew the same chance."""
    loop, journal, chance = around.loop, around.journal, around.chance
    replaced = simulation.replacements()
    with _logged(journal, everything=everything), interposed(loop, chance, replaced):
        try:
            loop.run_until_complete(simulation.run())
        except Exception as error:  # noqa: BLE001 - whatever stops a simulation is a finding
            journal.violated(f"the simulation stopped: {type(error).__name__} {error}")
        gc.collect()  # a task whose failure nobody asked for is reported only now
    end = f"{chance.random()} {loop.passed_s}"
    simulation.bury()
    for context in loop.unhandled:
        journal.violated(f"unhandled: {context}")
    return end


class _Simulation:
    """The programs of one scenario, and the course of events."""

    def __init__(self, around: Surroundings) -> None:
        self.back_s = 0.0
        self._around = around
        scenario = around.scenario
        self.schedulers = [
            SchedulerProgram(around, f"s{number}") for number in range(scenario.schedulers)
        ]
        around.offices = lambda: [
            office for each in self.schedulers if (office := each.office) is not None
        ]
        self.nodes = [
            NodeProgram(around, f"n{number}", gpus) for number, gpus in enumerate(scenario.nodes)
        ]
        by_name = {node.name: node for node in self.nodes}
        self.functions = [
            FunctionProgram(
                around, number, self.nodes[number % len(self.nodes)], by_name, self._life_of
            )
            for number in range(len(scenario.functions))
        ]
        self.gateways = [
            GatewayProgram(around, f"g{number}", self.functions)
            for number in range(scenario.gateways)
        ]
        self.callers = CallersProgram(around)
        self.probe = ServiceProbe(around, self.callers)
        self.operator = OperatorProgram(around, self.callers, self.schedulers, self._life_of)
        alone: list[Runnable] = [*self.schedulers, *self.nodes, *self.gateways]
        if scenario.shared_queue:
            alone.append(around.nats)
        self.machines = {each.name: Machine(around, each.name, each) for each in alone}
        for function in self.functions:
            self.machines[function.name] = Machine(around, function.host.name, function)
        self.clients = Machine(around, self.callers.name, self.callers)
        self.verdicts = Verdicts(
            *(self.schedulers, self.nodes, self.functions, self.gateways),
            *(self.callers, self.operator),
            wiped=any(fault.kind is FaultKind.WIPE for fault in scenario.faults),
        )

    def replacements(self) -> tuple[Replacement, ...]:
        """What has no port of its own, in the modules that use it."""
        disks = {each.name: each.disk for each in self.gateways}

        def committer(path: Path, prepare: Callable[..., None]) -> SimulatedCommitter:
            return SimulatedCommitter(disks[path.parent.parent.name], prepare)

        chance = self._around.chance
        return (
            (sqlite_queue, "Committer", committer),
            *SHARED_QUEUE,
            (job_worker, "Random", lambda: Random(chance.getrandbits(64))),
            (job_worker, "callback_session", lambda *_: SimulatedSession()),
            (scheduler_service, "term_at", term_at),
            (election, "name_of_this_process", _name_of_this_process),
            (election, "has_ended", self._has_ended),
        )

    async def run(self) -> None:
        """The whole course: load and faults, the way back, and rest."""
        around = self._around
        self.clients.start()
        for machine in self.machines.values():
            machine.start()
        watch = asyncio.create_task(self._watch())
        clients = self.clients.life
        assert clients is not None, "nothing befalls them"
        loading = clients.start(self.callers.load(), "load")
        operating = clients.start(self.operator.run(), "operator")
        await Faults(around, self.machines).run()
        around.journal.note("all faults are over")
        began_s = around.loop.passed_s
        probe = self.probe
        clients.start(probe.run(), "probe")
        within_s = _BACK_S + around.scenario.backlog_s
        if not await self._until(lambda: probe.back_s is not None, within_s):
            around.journal.violated("service did not return")
        self.back_s = around.loop.passed_s - began_s if probe.back_s is None else probe.back_s
        if not await self._until(lambda: loading.done() and not self._open_calls(), _DONE_S):
            around.journal.violated(f"calls do not end: {self._open_calls()[:5]}")
        if not await self._until(operating.done, _DONE_S):
            around.journal.violated("the operator's changes are not accepted")
        if not await self._until(lambda: not list(self.verdicts.of_calls()), _DONE_S):
            self._judge(self.verdicts.of_calls())
        if not await self._until(lambda: not list(self.verdicts.at_rest()), _REST_S):
            self._judge(self.verdicts.at_rest())
        self._judge(self.verdicts.always())
        watch.cancel()

    def bury(self) -> None:
        """Nothing runs any more, and nothing cleans up."""
        loop, machines = self._around.loop, [*self.machines.values(), self.clients]
        for machine in machines:
            machine.kill()
        before = len(loop.unhandled)
        bury(loop, [life for machine in machines for life in machine.buried])
        del loop.unhandled[before:]
        for gateway in self.gateways:
            gateway.disk.close()

    async def _watch(self) -> None:
        """Look all the time at what must always hold."""
        while not self._around.journal.violations:
            await asyncio.sleep(_LOOK_S)
            self._judge(self.verdicts.always())

    async def _until(self, holds: Callable[[], bool], within_s: float) -> bool:
        loop = self._around.loop
        until_s = loop.passed_s + within_s
        while not holds():
            if loop.passed_s > until_s:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    def _open_calls(self) -> list[str]:
        return [each.id for each in self.callers.calls.values() if each.status is None]

    def _judge(self, found: Iterator[str]) -> None:
        for text in found:
            self._around.journal.violated(text)

    def _life_of(self, node: str) -> SimulatedProgram | None:
        return self.machines[node].life

    def _has_ended(self, process: str) -> bool:
        """Of programs on one host a killed one is known to have ended."""
        program = PROGRAM.get()
        host = "" if program is None else program.host
        for machine in self.machines.values():
            if machine.host == host and any(life.name == process for life in machine.buried):
                return True
        return False


def _name_of_this_process() -> str:
    program = PROGRAM.get()
    return "" if program is None else program.name


@contextmanager
def _logged(journal: EventJournal, *, everything: bool) -> Iterator[None]:
    """Have the journal take the logs and what else is only printed."""
    root, taker = logging.getLogger(), JournalLogs(journal)
    before: list[Any] = root.handlers[:]
    level, disabled, hook = root.level, root.manager.disable, sys.unraisablehook
    root.handlers[:] = [taker]
    root.setLevel(logging.INFO if everything else logging.WARNING)
    logging.disable(logging.NOTSET)
    sys.unraisablehook = lambda what: journal.violated(f"ignored: {what.object} {what.exc_value}")
    try:
        yield
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        logging.disable(disabled)
        sys.unraisablehook = hook


def told(outcome: SeedOutcome) -> str:
    """What was wrong with the run of a seed, after the last events, and how to have it again."""
    lines = [*outcome.last, *(f"WRONG at {each}" for each in outcome.violations)]
    return "\n".join([*lines, f"again: python -m hunt.seeds --seed {outcome.seed} --verbose"])
