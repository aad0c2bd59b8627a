"""Seeds of the simulated control plane: their replay, and whether they find defects."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from gateway_ext.calls.exchange import Exchange
from gateway_ext.jobs.attempts import CallAnswered, JobDone, JobEnding
from gateway_ext.jobs.values import Job
from gateway_ext.jobs.worker import JobDispatcher
from gpu_manager.attachment.attachment import Attachment
from hunt.seeds.simulation import run_seed
from scheduler.api import Event, SlotFreed
from tests.kit.nodes.in_memory_runtime import InMemoryHosted
from tests.kit.places import ROOT

pytestmark = pytest.mark.group("planted_defects", seconds=30)

# Enough to meet each planted defect several times over: the rarest shows in one seed of thirty.
_TRIES = range(1, 201)


@pytest.mark.parametrize("seed", [8])
def test_seed_replays_to_the_same_events_in_other_processes(seed: int) -> None:
    here = run_seed(seed).digest[:16]
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "hunt.seeds", "--seed", str(seed)]
        with_seed = ["env", f"PYTHONHASHSEED={hash_seed}", *command]
        run = subprocess.run(with_seed, cwd=ROOT, capture_output=True, text=True, check=False)
        assert f"digest {here}" in run.stdout, run.stdout + run.stderr


def _found_by(words: str) -> bool:
    """Whether some seed fails, and says so in these words."""
    return any(words in text for seed in _TRIES for text in run_seed(seed).violations)


def test_a_job_that_is_finished_before_its_answer_is_stored_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conclude: Callable[..., Any] = JobDispatcher._conclude  # noqa: SLF001 - a defect is planted

    async def forgetful(self: JobDispatcher, job: Job, ending: JobEnding) -> None:
        await conclude(self, job, JobDone() if isinstance(ending, CallAnswered) else ending)

    monkeypatch.setattr(JobDispatcher, "_conclude", forgetful)
    assert _found_by("was accepted and never called back")


def test_a_call_that_is_repeated_though_it_may_have_begun_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def always(_: Exchange, *, sent: bool) -> bool:
        del sent
        return True

    monkeypatch.setattr(Exchange, "_may_repeat", always)
    assert _found_by("was begun 2 times")


def test_a_freed_slot_that_is_not_reported_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    report, freed = Attachment.report, 0

    def silent(self: Attachment, event: Event) -> None:
        nonlocal freed
        freed += isinstance(event, SlotFreed)
        if not isinstance(event, SlotFreed) or freed % 5:
            report(self, event)

    monkeypatch.setattr(Attachment, "report", silent)
    assert _found_by("the core has leases")


def test_a_slot_that_is_freed_while_a_call_runs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(self: InMemoryHosted, lease: int, grace_s: float = 2.0) -> None:
        del grace_s
        self.admitted.discard(lease)

    monkeypatch.setattr(InMemoryHosted, "end", at_once)
    assert _found_by("compute on")
