"""Two hundred seeds of the simulated control plane, their replay, and whether they find defects."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway_ext.calls.exchange import Exchange
from gateway_ext.jobs.execution.job_dispatcher import JobDispatcher
from gateway_ext.jobs.execution.job_endings import CallAnswered, JobDone, JobEnding
from gateway_ext.jobs.queue.job_values import Job
from gpu_manager.attachment.attachment import Attachment
from scheduler.api import Event, SlotFreed
from testbed.nodes.in_memory_runtime import InMemoryHosted
from tests.seeds.scenarios.fault_plan import Fault, FaultKind
from tests.seeds.scenarios.planned_functions import PlannedFunction
from tests.seeds.scenarios.scenario import GpuShape, scenario_of
from tests.seeds.simulation import SeedOutcome, run_scenario, run_seed

_SEEDS, _TOGETHER = 200, 20
_ROOT = Path(__file__).parents[2]
# Enough to meet each planted defect several times over.
_TRIES = range(1, 41)


def _told(outcome: SeedOutcome) -> str:
    lines = [*outcome.last, *(f"WRONG at {each}" for each in outcome.violations)]
    return "\n".join([*lines, f"again: python -m tests.seeds --seed {outcome.seed} --verbose"])


@pytest.mark.parametrize("first", range(1, _SEEDS + 1, _TOGETHER))
def test_seeds_keep_every_promise(first: int) -> None:
    for seed in range(first, first + _TOGETHER):
        outcome = run_seed(seed)
        assert not outcome.violations, _told(outcome)
        assert outcome.calls


@pytest.mark.parametrize("seed", [8])
def test_seed_replays_to_the_same_events_in_other_processes(seed: int) -> None:
    here = run_seed(seed).digest[:16]
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "tests.seeds", "--seed", str(seed)]
        with_seed = ["env", f"PYTHONHASHSEED={hash_seed}", *command]
        run = subprocess.run(with_seed, cwd=_ROOT, capture_output=True, text=True, check=False)
        assert f"digest {here}" in run.stdout, run.stdout + run.stderr


def test_streams_are_served_again_after_their_node_was_silent() -> None:
    """Twice as many calls wait by then as there are threads, and the threads for leases."""
    cut = (Fault(5.0, FaultKind.CUT, "n0", other, 14.0) for other in ("s0", "g0", "n1", "n2"))
    stream = PlannedFunction("f0", "team", 40, threads=8, steps=5)
    plain = PlannedFunction("f1", "team", 40, threads=8)
    scenario = replace(
        scenario_of(11),
        policy="lalbo3",
        exit_rule="never",
        schedulers=1,
        nodes=(1, 1, 1),
        shape=GpuShape(),
        gateways=1,
        shared_queue=False,
        functions=(stream, plain),
        workflow=False,
        gpu_mib=400,
        latency_s=(0.0001, 0.0005),
        run_s=(0.01, 0.03),
        model_load_s=(0.01, 0.05),
        every_s=0.25,
        load_s=40.0,
        async_share=0.2,
        leaving_share=0.0,
        standing=True,
        changes=(),
        faults=tuple(cut),
    )
    outcome = run_scenario(scenario)
    assert not outcome.violations, _told(outcome)
    assert outcome.back_s < 5.0, "it was 40"


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
