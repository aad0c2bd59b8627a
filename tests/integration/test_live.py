"""The running scheduler on emulated GPUs, over its streams, held to its own recording."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from cache_manager.model.ids import MIB, ModelId
from gpu_manager.attachment.attachment import Attachment
from gpufaas.commands.replay import replay
from scheduler import policies
from scheduler.client import lease_client
from scheduler.core.core import Core
from scheduler.model.actions import Finish
from scheduler.model.events import RequestArrived
from scheduler.model.values import LeaseId, RequestId, RequestOutcome, SlotId
from scheduler.recording import Beginning, digest, parsed
from scheduler.service.streams import callers
from scheduler.service.streams.nodes import NodeStreams
from scheduler.sim.model_catalogue import Hardware, SimModel
from scheduler.sim.workload import Workload
from scheduler.wire.node_stream import StreamTimes
from tests.kit.live.emulated_node import Noted, Word, given_twice
from tests.kit.live.live_load import arrive, one_after_the_other, thesis, zipf_gpus
from tests.kit.live.live_runs import OVERLAP_BEFORE_S, OVERLAP_RUN_S, POLICY
from tests.kit.live.live_system import LiveSystem, Setup, live
from tests.kit.places import ROOT
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.timeout(180, func_only=True)

RECORDED = ROOT / "tests" / "recordings" / "every-policy.jsonl"
NEWER = {"beside", "esg", "fair", "gain", "pairs", "togo"}  # policies that came after the recording
HARDWARE = Hardware(gpus=8)


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stream breaks when the machine holds this process up: its requests would come again."""
    times = StreamTimes(silence_s=PATIENCE_S, greeting_s=PATIENCE_S, grace_s=PATIENCE_S)
    monkeypatch.setattr(Attachment.__init__, "__defaults__", (times,))
    defaults = NodeStreams.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "times", times)
    monkeypatch.setattr(callers, "GREETING_S", PATIENCE_S)
    monkeypatch.setattr(lease_client, "GREETING_S", PATIENCE_S)
    monkeypatch.setattr(lease_client, "SILENCE_S", PATIENCE_S)


def a_load() -> Workload:
    """200 requests within 2 seconds, for eight GPUs on two nodes."""
    return thesis(gpus=8, minutes=1, within_s=2.0, seed=1)


def a_setup(policy: str, load: Workload, record: Path) -> Setup:
    return Setup(policy, HARDWARE.specs(), load.models, record)


def ends(path: Path) -> Counter[tuple[RequestId, RequestOutcome]]:
    """How often each request of a recording ended, in a fresh core."""
    found: Counter[tuple[RequestId, RequestOutcome]] = Counter()
    core: Core | None = None
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = parsed(line)
        if isinstance(entry, Beginning):
            core = entry.core()
            continue
        assert core is not None
        actions = core.handle(entry.event, entry.at_s)
        assert digest(actions) == entry.digest
        found.update((each.request, each.outcome) for each in actions if isinstance(each, Finish))
    return found


def once_each(load: Workload) -> Counter[tuple[RequestId, RequestOutcome]]:
    """Every request of a load completed, once."""
    names = (RequestId(f"r{number}") for number in range(len(load.arrivals)))
    return Counter((name, RequestOutcome.COMPLETED) for name in names)


def wrongs(system: LiveSystem) -> list[object]:
    """What the nodes' own logs say against the scheduler."""
    nodes = system.nodes.values()
    return [wrong for node in nodes for wrong in (*node.wrong, *given_twice(node.log))]


def served(system: LiveSystem) -> Counter[LeaseId]:
    """How often each lease was given and freed, by the nodes' own logs."""
    return Counter(noted.lease for node in system.nodes.values() for noted in node.log)


def checked(system: LiveSystem, load: Workload) -> None:
    """Every caller was answered, under a lease that its node gave and freed once, and alone."""
    assert len(system.answered) == len(load.arrivals)
    assert wrongs(system) == []
    assert served(system) == {answered.lease: 2 for answered in system.answered}


@pytest.mark.parametrize("policy", policies.available())
async def test_live_run_replays_and_ends_every_request_once(policy: str, tmp_path: Path) -> None:
    load, record = a_load(), tmp_path / "run.jsonl"
    async with live(a_setup(policy, load, record)) as system:
        await arrive(system, load.arrivals)
        checked(system, load)
    found = replay(record)
    assert (found.terms, found.differing_lines) == (1, [])
    assert found.by_kind["RequestArrived"] == len(load.arrivals)
    assert ends(record) == once_each(load)


async def test_no_request_is_lost_when_the_policy_changes_under_load(tmp_path: Path) -> None:
    load, record = a_load(), tmp_path / "run.jsonl"
    names = policies.available()
    waiting: list[int] = []
    async with live(a_setup(names[-1], load, record)) as system:
        arriving = asyncio.create_task(arrive(system, load.arrivals))
        await eventually(lambda: bool(system.answered))
        while not arriving.done() or len(waiting) < 2 * len(names):
            for name in names:
                await system.driver.set_policy(name)
                waiting.append(
                    system.driver.status().waiting + system.driver.status().waiting_locally
                )
                await asyncio.sleep(0.05)
        await arriving
        checked(system, load)
    assert max(waiting) > 0
    found = replay(record)
    assert found.differing_lines == []
    assert found.by_kind["PolicySet"] == len(waiting) >= 2 * len(names)
    assert ends(record) == once_each(load)


async def test_gpu_holds_several_leases_at_once_when_its_slot_allows_them() -> None:
    """The callers work without the GPU first, so that up to five leases are held meanwhile."""
    model = SimModel(ModelId("m"), "one", 1024 * MIB, OVERLAP_RUN_S, OVERLAP_RUN_S)
    async with live(Setup(POLICY, zipf_gpus(1, 5), [model])) as system:
        await one_after_the_other(system, [model.id] * 60, 10, OVERLAP_BEFORE_S)
        (node,) = system.nodes.values()
        assert given_twice(node.log, 5) == []
        assert given_twice(node.log, 4) != []
        assert served(system) == {answered.lease: 2 for answered in system.answered}


def test_recorded_live_run_replays_to_the_same_actions() -> None:
    """To record again: `python -m bench.live --record tests/recordings/every-policy.jsonl`."""
    found = replay(RECORDED)
    assert (found.terms, found.differing_lines) == (1, [])
    assert found.by_kind["PolicySet"] == len(set(policies.available()) - NEWER)
    ended = ends(RECORDED)
    assert len(ended) == ended.total() == found.by_kind["RequestArrived"] > 50
    assert {outcome for _, outcome in ended} == {RequestOutcome.COMPLETED}


def test_recorded_live_run_is_answered_otherwise_when_an_event_is_missing(tmp_path: Path) -> None:
    lines = RECORDED.read_text(encoding="utf-8").splitlines(keepends=True)
    arrived = [n for n, line in enumerate(lines) if RequestArrived.__name__ in line]
    del lines[arrived[len(arrived) // 2]]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    assert replay(path).differing_lines


def test_log_tells_when_a_slot_is_given_twice() -> None:
    slot, first, second = SlotId("g0"), LeaseId(1), LeaseId(2)
    given = [Noted(Word.GIVEN, slot, first), Noted(Word.GIVEN, slot, second)]
    in_turn = [given[0], Noted(Word.FREED, slot, first), given[1]]
    assert given_twice(given) == [given[1]]
    assert given_twice(given, leases=2) == given_twice(in_turn) == []
