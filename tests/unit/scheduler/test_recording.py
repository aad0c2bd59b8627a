"""A live run is written to a file, and a fresh core does the same again."""

from pathlib import Path

import pytest

from cache_manager.model import ModelId, Tier
from gpufaas.cli import EXIT_BAD_USE, main
from gpufaas.replay import replay
from scheduler import policies
from scheduler.core import Core
from scheduler.errors import BadRecording
from scheduler.events import ModelLoaded, RequestArrived
from scheduler.model import CoreSettings, LeaseId
from scheduler.recording import VERSION, Beginning, beginning_line, digest, known, parsed, step_line
from scheduler.service.recorder import Recorder
from tests.builders import a_core, gpu, request
from tests.digest import lived

RECORDINGS = Path(__file__).parents[2] / "recordings"


class Everyone:
    """Explains every request."""

    def __contains__(self, request: object) -> bool:
        return True


def a_recording(path: Path, policy: str) -> None:
    """A random life under this policy."""
    world = lived(policy, seed=5, count=400)
    recorder = Recorder(path)
    recorder.begins(Beginning(VERSION, policy, "lru"))
    for (event, now), actions in zip(world.log, world.answers, strict=True):
        recorder(now, event, actions)
    recorder.close()


@pytest.mark.parametrize("policy", policies.available())
def test_fresh_core_does_the_same_when_a_recording_is_replayed(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    a_recording(path, policy)
    found = replay(path)
    assert (found.terms, found.differing_lines) == (1, [])
    assert found.events > 300


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_fresh_core_does_the_same_as_a_live_scheduler_did(path: Path) -> None:
    """Written by `python -m tests.recorded`: made anew when what the core decides has changed."""
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
    profiles = before.cluster.profiles.known()
    kept = tuple(known(model, profile) for model, profile in profiles.items())
    line = beginning_line(Beginning(VERSION, "lalbo3", "lru", profiles=kept))
    again = parsed(line)
    assert isinstance(again, Beginning)
    found = again.core().cluster.profiles.known()
    assert {model: known(model, profile) for model, profile in found.items()} == {
        model: known(model, profile) for model, profile in profiles.items()
    }


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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello\n",
        "[1, 2]\n",
        '{"begins": {"version": 99, "policy": "lb", "eviction": "lru"}}\n',
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


def test_recording_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRecording, match="No such file"):
        Recorder(tmp_path / "missing" / "run.jsonl")
