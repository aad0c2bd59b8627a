"""Random lives of a whole cluster under the driver: nothing is lost, doubled or overcommitted."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest

from cache_manager.model.ids import MIB, GpuId, ModelId
from scheduler import policies
from scheduler.api import Placement
from scheduler.composition import make_core
from scheduler.core.core import Core
from scheduler.model.actions import Action, DemoteStored, EndLease, Finish, Order
from scheduler.model.errors import SchedulerError
from scheduler.model.events import MemoryPressure, ModelRegistered, RunFailed, RunFinished
from scheduler.model.values import AfterLoss, CoreSettings, RequestId, RequestOutcome, SlotId
from scheduler.service.survey import gpus_of
from scheduler.wire.cluster_status import GpuStatus
from tests.kit.cores.builders import gpu, model, request
from tests.kit.nodes.fake_node import FakeNode, fake_node, wrongs
from tests.kit.virtual_time import virtually
from tests.kit.worlds.driver_stage import Stage, a_stage

SIZES_MB = (700, 1300, 1900, 2600, 3500)
MODELS = tuple(ModelId(f"m{number}") for number in range(len(SIZES_MB) + 1))
SETTINGS = CoreSettings(max_waiting=40)
LONG_S = 60.0
CALLERS = 200

each_policy = pytest.mark.parametrize("policy", policies.available())


@dataclass
class Life:
    """One stage, its chance, and how each caller's request came out for the caller."""

    stage: Stage
    random: Random
    outcomes: Counter[str] = field(default_factory=Counter)

    async def callers(self) -> None:
        """Until the last of them is gone."""
        await asyncio.gather(*(self._caller(number) for number in range(CALLERS)))

    async def _caller(self, number: int) -> None:
        random, driver = self.random, self.stage.driver
        await asyncio.sleep(random.uniform(0.0, LONG_S))
        now = asyncio.get_running_loop().time()
        wanted = random.sample(MODELS, random.choice((1, 1, 1, 2)))
        deadline_s = now + random.uniform(0.5, 20.0) if random.random() < 0.2 else None
        patience_s = random.uniform(0.0, 9.0) if random.random() < 0.2 else None
        asked = request(f"r{number}", *wanted, deadline_s=deadline_s)
        try:
            placement = await asyncio.wait_for(driver.acquire(asked), patience_s)
            await self._use(placement)
            if random.random() < 0.3:
                driver.release(placement.lease, may_return=True)
                await asyncio.sleep(random.uniform(0.0, 2.0))
                placement = await driver.wanted(asked.id)
                await self._use(placement)
        except (SchedulerError, TimeoutError) as error:
            self.outcomes[type(error).__name__] += 1
        else:
            self.outcomes["served"] += 1
            driver.release(placement.lease)
        await asyncio.sleep(1.0)
        driver.cancel(asked.id)  # its node was lost, and it was put into the queue again

    async def _use(self, placement: Placement) -> None:
        random, driver = self.random, self.stage.driver
        await asyncio.sleep(random.uniform(0.0, 1.5))
        chance = random.random()
        if chance < 0.1:
            driver.cancel(RequestId(f"r{random.randrange(CALLERS)}"))
        elif chance < 0.2:
            after = random.choice((AfterLoss.FAIL, AfterLoss.REQUEUE))
            driver.report(RunFailed(placement.lease, "crashed", after))
        else:
            driver.report(RunFinished(placement.slot, placement.models[0], 1, 0.5))

    async def people(self) -> None:
        """Ask for this and that until they are cancelled."""
        random, driver = self.random, self.stage.driver
        while True:
            await asyncio.sleep(random.uniform(0.0, 4.0))
            asked, gpus = random.choice(MODELS), driver.status().gpus
            there = random.choice(gpus).id if gpus and random.random() < 0.6 else None
            ask = random.choice((driver.pin, driver.unpin, driver.prefetch, driver.evict))
            try:
                await ask(asked, there)
                if random.random() < 0.2:
                    await driver.set_policy(random.choice(policies.available()))
                if there is not None and random.random() < 0.1:
                    driver.report(MemoryPressure(there, 300 * MIB))
            except SchedulerError as error:
                self.outcomes[f"people: {type(error).__name__}"] += 1

    async def accidents(self) -> None:
        """Nodes are detached, crash, refuse orders and attach again, until it is cancelled."""
        random, stage = self.random, self.stage
        while True:
            await asyncio.sleep(random.uniform(0.0, 8.0))
            node = random.choice(stage.nodes)
            chance = random.random()
            if chance < 0.2:  # a connection that broke and came back: all is still there
                stage.attach(node)
                continue
            if chance < 0.5:
                stage.driver.detach(node.name)
            elif chance < 0.8:
                node.breaks = {random.choice(("prepare", "grant", "end_lease", "contended"))}
            else:
                node.fails ^= {random.choice(MODELS)}
            await asyncio.sleep(random.uniform(0.0, 5.0))
            self.mend(node)

    def mend(self, node: FakeNode) -> None:
        """Start a node again if it was lost."""
        node.breaks = set()
        if node.name not in self.stage.driver.status().nodes:
            node.crash()
            self.stage.attach(node)

    async def end(self) -> None:
        """Let everything come to rest."""
        for node in self.stage.nodes:
            self.mend(node)
        await asyncio.sleep(LONG_S)


def a_life(policy: str, seed: str) -> Life:
    """Three nodes of different kinds; one of the models is not declared."""
    nodes = (
        fake_node("n0", gpu("g0", memory_mb=4000, node="n0"), gpu("g1", node="n0", slots=2)),
        fake_node("n1", gpu("g2", memory_mb=6000, node="n1", leases=2), end_s=0.3),
        fake_node("n2", gpu("g3", memory_mb=6000, node="n2"), load_s=0.2),
    )
    for node in nodes:
        node.sizes = {MODELS[-1]: 900 * MIB}
    stage = a_stage(*nodes, core=make_core(policy, settings=SETTINGS))
    for name, size_mb in zip(MODELS, SIZES_MB, strict=False):
        stage.driver.report(ModelRegistered(model(name, memory_mb=size_mb, load_s=1.0)))
    return Life(stage, Random(seed))


@each_policy
@pytest.mark.parametrize("seed", range(4))
@virtually
async def test_everything_ends_once_and_fits_when_anything_happens(policy: str, seed: int) -> None:
    life = a_life(policy, f"{policy} {seed}")
    stage = life.stage
    disturbers = [asyncio.ensure_future(life.people()), asyncio.ensure_future(life.accidents())]
    await life.callers()
    for disturber in disturbers:
        disturber.cancel()
    await life.end()

    assert wrongs(stage.nodes) == []
    callers = {name: count for name, count in life.outcomes.items() if "people" not in name}
    assert sum(callers.values()) == CALLERS
    assert callers["served"] > CALLERS / 3
    assert not stage.core.requests
    status = stage.driver.status()
    assert sum(status.counts.finished.values()) == CALLERS
    assert (status.waiting, status.waiting_locally) == (0, 0)
    for node in stage.nodes:
        assert node.leases == {}
        held = {shown.id: residents_of(shown) for shown in status.gpus if shown.node == node.name}
        assert held.keys() == node.residents.keys()
        for gpu_id, believed in held.items():
            there = node.residents[gpu_id]
            assert believed.keys() == there.keys()
            assert all(believed[name] >= there[name] for name in there)
    assert all(not slot.leases and not slot.queue for each in status.gpus for slot in each.slots)
    assert same_end(stage, replayed(policy, stage)[0])


@each_policy
@virtually
async def test_recording_gives_the_same_orders_and_answers_when_it_is_replayed(
    policy: str,
) -> None:
    life = a_life(policy, policy)
    disturber = asyncio.ensure_future(life.people())
    await life.callers()
    disturber.cancel()
    await life.end()

    core, actions = replayed(policy, life.stage)
    ordered = [action for action in actions if isinstance(action, Order)]
    assert len(ordered) > 2 * CALLERS
    for node in life.stage.nodes:
        gpus = {spec.id for spec in node.specs}
        slots = {slot.id for spec in node.specs for slot in spec.slot_specs()}
        mine = [each for each in ordered if _for(each, gpus, slots)]
        assert mine == node.orders
    ends = Counter(action.outcome for action in actions if isinstance(action, Finish))
    assert ends == life.stage.driver.status().counts.finished
    assert ends[RequestOutcome.COMPLETED] > CALLERS / 3
    assert same_end(life.stage, core)


def replayed(policy: str, stage: Stage) -> tuple[Core, list[Action]]:
    """A fresh core that was given the recording, and all that it answered."""
    core = make_core(policy, settings=SETTINGS)
    actions = [action for now, event in stage.events for action in core.handle(event, now)]
    return core, actions


def same_end(stage: Stage, core: Core) -> bool:
    """Whether a core has come to the same state as the stage's."""
    return gpus_of(core) == stage.driver.status().gpus and core.requests == stage.core.requests


def residents_of(shown: GpuStatus) -> dict[ModelId, int]:
    """What one GPU holds, as the driver believes; a size once measured is never taken back."""
    return {resident.model: resident.memory_bytes for resident in shown.residents}


def _for(order: Order, gpus: set[GpuId], slots: set[SlotId]) -> bool:
    assert not isinstance(order, DemoteStored), "nothing leaves by time here"
    return order.slot in slots if isinstance(order, EndLease) else order.gpu in gpus
