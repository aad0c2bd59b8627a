"""Brings the faults of a scenario about, and ends them."""

import asyncio
from collections.abc import Mapping

from hunt.seeds.machines import Machine
from hunt.seeds.programs.gateway_program import GatewayProgram
from hunt.seeds.programs.node_program import NodeProgram
from hunt.seeds.scenarios.fault_plan import ETCD, NATS, Fault, FaultKind
from hunt.seeds.surroundings import Surroundings
from tests.kit.simulation.job_disk import JobDisk


class Faults:
    """Acts on machines by their names; several faults of one target may overlap."""

    def __init__(self, around: Surroundings, machines: Mapping[str, Machine]) -> None:
        self._around = around
        self._machines = machines

    async def run(self) -> None:
        """All faults of the scenario, to the end of the last one."""
        await asyncio.gather(*(self._befall(fault) for fault in self._around.scenario.faults))
        self.end_all()

    def end_all(self) -> None:
        """Whatever is still wrong is put right: two faults may have met in one target."""
        around = self._around
        around.network.heal_all()
        around.etcd.up, around.etcd.frozen, around.etcd.full = True, False, False
        around.nats.full = False
        for machine in self._machines.values():
            machine.thaw()
            machine.set_clock(0.0)
            machine.start()
            if isinstance(machine.program, GatewayProgram):
                machine.program.disk.full = False

    async def _befall(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        self._around.journal.note(f"FAULT {fault}")
        if fault.target == ETCD and not fault.other:
            await self._of_etcd(fault)
        elif fault.other:
            await self._of_a_link(fault)
        else:
            await self._of_a_machine(fault, self._machines[fault.target])
        self._around.journal.note(f"over: {fault}")

    async def _of_etcd(self, fault: Fault) -> None:
        etcd = self._around.etcd
        if fault.kind is FaultKind.WIPE:
            await etcd.wipe()
        elif fault.kind is FaultKind.FULL:
            etcd.full = True
            await asyncio.sleep(fault.for_s)
            etcd.full = False
        elif fault.kind is FaultKind.FREEZE:
            etcd.frozen = True
            await asyncio.sleep(fault.for_s)
            etcd.frozen = False
        else:
            etcd.up = False
            await asyncio.sleep(fault.for_s)
            etcd.up = True

    async def _of_a_link(self, fault: Fault) -> None:
        network, one, other = self._around.network, fault.target, fault.other
        if fault.kind is FaultKind.RESET:
            network.reset(one, other)
        elif fault.kind is FaultKind.SLOW:
            network.slow(one, other, fault.amount)
            await asyncio.sleep(fault.for_s)
            network.slow(one, other, 0.0)
        else:
            ways = [(one, other)]
            if fault.kind is FaultKind.CUT:
                ways.append((other, one))
            for way in ways:
                network.block(*way)
            await asyncio.sleep(fault.for_s)
            for way in ways:
                network.heal(*way)

    async def _of_a_machine(self, fault: Fault, machine: Machine) -> None:
        kind = fault.kind
        if kind is FaultKind.WORKER:
            self._kill_a_worker(machine)
        elif kind is FaultKind.FREEZE:
            machine.freeze()
            await asyncio.sleep(fault.for_s)
            machine.thaw()
        elif kind is FaultKind.CLOCK:
            machine.set_clock(fault.amount)
            await asyncio.sleep(fault.for_s)
            machine.set_clock(0.0)
        elif kind is FaultKind.FULL:
            disk = self._around.nats if fault.target == NATS else _queue_of(machine)
            disk.full = True
            await asyncio.sleep(fault.for_s)
            disk.full = False
        elif kind is FaultKind.POWER:
            await self._lose_power(fault, machine)
        else:
            machine.stop() if kind is FaultKind.STOP else machine.kill()
            await asyncio.sleep(fault.for_s)
            machine.start()

    async def _lose_power(self, fault: Fault, machine: Machine) -> None:
        """The whole host goes, without a word to anybody, and comes back."""
        network = self._around.network
        there = [each for each in self._machines.values() if each.host == machine.host]
        others = {each.host for each in self._machines.values()} | {ETCD}
        ways = [(machine.host, other) for other in sorted(others - {machine.host})]
        for one, other in ways:
            network.block(one, other)
            network.block(other, one)
        for each in there:
            each.kill()
            if isinstance(each.program, GatewayProgram):
                each.program.disk.lose_power()
        await asyncio.sleep(fault.for_s)
        for one, other in ways:
            network.heal(one, other)
            network.heal(other, one)
        for each in there:
            each.start()

    def _kill_a_worker(self, machine: Machine) -> None:
        program, life = machine.program, machine.life
        assert isinstance(program, NodeProgram), "only nodes have workers"
        if life is None or not program.serves:
            return

        def kill() -> None:
            model = program.runtime.kill_one()
            self._around.journal.note(f"{machine.name} loses the worker of {model}")

        self._around.loop.call_soon(kill, context=life.context)


def _queue_of(machine: Machine) -> JobDisk:
    assert isinstance(machine.program, GatewayProgram), "only gateways have a queue"
    return machine.program.disk
