"""A live run is written to a file, and a fresh core does the same again."""

import asyncio
import logging
from pathlib import Path

import pytest
from msgspec.structs import replace

from cache_manager.model.ids import ModelId, Tier
from cache_manager.model.request_rates import IdleGaps
from gpufaas.cli import EXIT_BAD_USE, main
from gpufaas.commands.replay import replay
from scheduler import policies
from scheduler.core.core import Core
from scheduler.model.errors import BadRecording
from scheduler.model.events import ModelLoaded, RequestArrived, RunFinished
from scheduler.model.profiles import Profile
from scheduler.model.values import Configuration, CoreSettings, LeaseId, SlotId
from scheduler.recording import VERSION, Beginning, beginning_line, digest, parsed, step_line
from scheduler.service.history.recorder import RunRecorder
from scheduler.service.leadership.term import Office
from scheduler.service.metrics.counting import SchedulerCounters
from scheduler.settings import Settings
from scheduler.store.memory_store import MemoryStore
from scheduler.store.recovery import recover
from scheduler.wire.codec import encoded
from scheduler.wire.model_records import model_record
from tests.kit.cores.action_digest import lived
from tests.kit.cores.builders import a_core, gpu, request
from tests.kit.cores.random_lives import LEAVING
from tests.kit.nodes.attaching import attach_in_process
from tests.kit.nodes.fake_node import fake_node
from tests.kit.places import ROOT

LOG = logging.getLogger("tests.recording")
RECORDINGS = ROOT / "tests" / "recordings"


class Everyone:
    """Explains every request."""

    def __contains__(self, request: object) -> bool:
        return True


def a_recording(path: Path, policy: str) -> None:
    """A random life under this policy."""
    world = lived(policy, seed=5, count=600)
    recorder = RunRecorder(path)
    recorder.begins(
        Beginning(VERSION, policy, "lru", standing=LEAVING.standing, exit_rule=LEAVING.exit_rule)
    )
    for (event, now), actions in zip(world.log, world.answers, strict=True):
        recorder(now, event, actions)
    recorder.close()


def test_requests_are_served_when_the_recording_cannot_be_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = RunRecorder(Path("/dev/full"))
    world = lived("lb", seed=5, count=200)
    with caplog.at_level(logging.ERROR):
        for (event, now), actions in zip(world.log, world.answers, strict=True):
            recorder(now, event, actions)
        recorder.flush()
        recorder.close()
    assert len(caplog.records) == 1
    assert "the recording /dev/full ends: [Errno 28]" in caplog.text


@pytest.mark.parametrize("policy", policies.available())
def test_fresh_core_does_the_same_when_a_recording_is_replayed(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    a_recording(path, policy)
    found = replay(path)
    assert (found.terms, found.differing_lines) == (1, [])
    assert found.events >= 300


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_fresh_core_does_the_same_as_a_live_scheduler_did(path: Path) -> None:
    """`python -m tests.kit.cores.recorded_run` writes them again when decisions change."""
    found = replay(path)
    assert (found.terms, found.differing_lines) == (1, [])
    assert found.by_kind["PolicySet"] > 1
    assert found.by_kind["SlotFreed"] > 50


def test_replay_names_the_line_at_which_the_answer_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    a_recording(path, "lb")
    lines = path.read_text().splitlines(keepends=True)
    number = next(
        n for n, line in enumerate(lines) if "RequestArrived" in line and '""' not in line
    )
    del lines[number]
    path.write_text("".join(lines))
    assert main(["replay", str(path)]) == 1
    assert "answers differ, the first at line" in capsys.readouterr().out
    assert min(replay(path).differing_lines) > number


def test_two_terms_in_one_file_begin_with_a_fresh_core_each(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    a_recording(path, "lb")
    a_recording(path, "netgain")
    found = replay(path)
    assert (found.terms, found.differing_lines) == (2, [])


def test_profiles_of_an_earlier_leader_are_part_of_the_beginning() -> None:
    before = a_core(models=("bert",))
    before.handle(ModelLoaded(gpu("g0").id, ModelId("bert"), 4.0, Tier.DISK, 3 << 30), 0.0)
    given = Configuration(2, 1, 1)
    before.handle(RunFinished(SlotId("g0"), ModelId("bert"), 2, 0.5, configuration=given), 0.0)
    profiles = before.cluster.profiles.known
    kept = {model: model_record(profile, 0) for model, profile in profiles.items()}
    line = beginning_line(Beginning(VERSION, "lalbo3", "lru", models=kept))
    again = parsed(line)
    assert isinstance(again, Beginning)
    found = again.core().cluster.profiles.known
    assert found[ModelId("bert")].configured_s == {(given, gpu("g0").gpu_type): 0.5}
    assert {model: model_record(known, 0) for model, known in found.items()} == kept


async def test_term_that_began_with_recovered_profiles_replays_to_the_same_answers(
    tmp_path: Path,
) -> None:
    """From a datastore: what the core reserves and expects was measured in an earlier term."""
    path = tmp_path / "run.jsonl"

    store, recorder = MemoryStore(), RunRecorder(path)
    for model, memory_bytes, load_s in (("large", 3 << 30, 9.0), ("small", 1 << 30, 0.5)):
        profile = Profile(memory_bytes)
        profile.measured_bytes = memory_bytes
        profile.load_s = {Tier.HOST: load_s, Tier.DISK: 2 * load_s}
        profile.measured_loads = {Tier.HOST}
        profile.run_s = {(1, "any"): 0.2, (8, "H200"): 0.3}
        profile.measured_runs = {(8, "H200")}
        profile.usual_run_s = 0.3
        profile.features = {"sm": 0.5}
        await store.put(f"models/{model}", encoded(model_record(profile, 0)))
    recovered = await recover(store, LOG)
    office = Office(Settings(), 1, SchedulerCounters(), recovered, recorder)
    node = fake_node("n0", *(gpu(f"g{n}", node="n0", memory_mb=4096) for n in range(2)))
    attach_in_process(office.driver, node)
    asked = [request(f"r{n}", model) for n, model in enumerate(("large", "small", "large"))]
    waiting = [asyncio.create_task(office.driver.acquire(each)) for each in asked]
    await asyncio.wait(waiting[:2])
    office.close()
    await asyncio.gather(*waiting, return_exceptions=True)
    recorder.close()
    found = replay(path)
    assert found.differing_lines == []
    assert found.by_kind["RequestArrived"] == 3
    lines = path.read_text().splitlines(keepends=True)
    beginning = parsed(lines[0])
    assert isinstance(beginning, Beginning)
    assert beginning.models.keys() == {"large", "small"}
    path.write_text(beginning_line(replace(beginning, models={})) + "\n" + "".join(lines[1:]))
    assert replay(path).differing_lines  # they do decide


def test_beginning_carries_the_gaps_that_decide_when_models_leave() -> None:
    profile = Profile(1)
    gaps = profile.gaps = IdleGaps.of([(28, 3.5), (31, 0.25)])
    models = {ModelId("bert"): model_record(profile, 0)}
    beginning = Beginning(VERSION, "lb", "lru", exit_rule="adaptive", models=models)
    assert parsed(beginning_line(beginning)) == beginning
    assert beginning.core().cluster.profiles.known[ModelId("bert")].gaps.counts == gaps.counts


def test_beginning_carries_what_decides_admission_and_lease_numbers() -> None:
    beginning = Beginning(VERSION, "lb", "lru", {}, 1, LeaseId(1 << 40), 1 << 40)
    core = beginning.core()
    core.handle(RequestArrived(request("r0")), 0.0)
    assert "queue full" in str(core.handle(RequestArrived(request("r1")), 0.0))
    assert parsed(beginning_line(beginning)) == beginning


def test_explanations_do_not_count_in_the_digest() -> None:
    def answer(core: Core) -> str:
        return digest(core.handle(RequestArrived(request("r0")), 0.0))

    watched = a_core(gpus=(gpu("g0"),), settings=CoreSettings(explain=Everyone()))
    assert answer(watched) == answer(a_core(gpus=(gpu("g0"),))) != ""


def test_half_a_line_at_the_end_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    a_recording(path, "lb")
    whole = replay(path).events
    with path.open("a", encoding="utf-8") as file:
        file.write('[1.0, ["Requ')
    assert replay(path).events == whole


def _beginning_with(**facts: object) -> str:
    """The beginning of a term whose one model has these, too."""
    times: dict[str, object] = {"load": [], "run": [], "configured": [], "usual_run_s": None}
    model = {"used_unix_s": 0, "memory_bytes": 1, "measured_bytes": 0, "features": {}, **times}
    begins = {"version": VERSION, "policy": "lb", "eviction": "lru"}
    return encoded({**begins, "models": {"m": {**model, **facts}}}).decode() + "\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello\n",
        "[1, 2]\n",
        '{"version": 99, "policy": "lb", "eviction": "lru"}\n',
        _beginning_with(load=[{"tier": "ATTIC", "load_s": 1.0, "measured": True}]),
        _beginning_with(gaps=[[-1, 1.0]]),
        step_line(0.0, RequestArrived(request("r0")), []) + "\n",
    ],
)
def test_what_is_no_recording_is_refused_in_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(BadRecording):
        replay(path)
    assert main(["replay", str(path)]) == EXIT_BAD_USE
    assert capsys.readouterr().err.startswith(f"gpufaas replay: {path}")


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ('{"begins": {"version": 1, "policy": "lb", "eviction": "lru", "gaps": {}}}', 1),
        ('{"version": 99, "policy": "lb", "eviction": "lru"}', 99),
        ('{"version": 99, "strategy": "lb"}', 99),
    ],
)
def test_recording_of_another_version_is_refused_as_such(line: str, version: int) -> None:
    with pytest.raises(BadRecording) as refused:
        parsed(line)
    assert str(refused.value) == f"version {version}; this is version {VERSION}"


def test_recording_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRecording, match="No such file"):
        RunRecorder(tmp_path / "missing" / "run.jsonl")
