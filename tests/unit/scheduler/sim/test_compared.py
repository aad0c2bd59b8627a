"""Another policy on recorded traffic: compared with runs whose outcome under it is known."""

from collections.abc import Iterator
from functools import cache

import pytest

from scheduler import policies
from scheduler.model.errors import BadRecording
from scheduler.recording import Beginning, RecordedStep, parsed
from scheduler.sim.engine import Engine
from scheduler.sim.model_catalogue import Hardware
from scheduler.sim.workload import Arrivals, Pattern, Workload, thesis
from tests.kit.cores.written_recordings import Recording, against, check_wild_life, outlook
from tests.kit.places import ROOT

pytestmark = pytest.mark.group("replay", seconds=60)

RECORDINGS = ROOT / "tests" / "recordings"
HARDWARE = Hardware(gpus=6)


def recorded(name: str) -> Iterator[Beginning | RecordedStep]:
    """A live run, as the repository has it."""
    text = (RECORDINGS / f"{name}.jsonl").read_text(encoding="utf-8")
    return map(parsed, text.splitlines())


# -- runs of which the truth under every policy is known ------------------------------------------


def a_load() -> Workload:
    """Random arrivals, so that no two events are at the same time."""
    return thesis(15, 160, 2, Pattern(Arrivals.POISSON), seed=3)


@cache
def simulated(policy: str) -> tuple[Recording, Engine]:
    """A run of the simulator, recorded as if it had been live."""
    recording = Recording(policy)
    engine = Engine(recording, HARDWARE, a_load())
    engine.run()
    return recording, engine


@pytest.mark.parametrize("policy", policies.available())
def test_what_another_policy_would_have_done_is_what_it_does(policy: str) -> None:
    """Every policy is simulated from a recording under this one, and compared with its own run."""
    found = against(simulated(policy)[0], *policies.available())
    for name in policies.available():
        summary = simulated(name)[1].run_result.tally.summary()
        reported = outlook(found, name)
        assert reported.completed == summary.requests == 320
        assert reported.avg_latency_s == pytest.approx(summary.avg_latency_s, rel=1e-6), name
        assert reported.p99_s == pytest.approx(summary.p99_s, rel=1e-6), name
        assert 1.0 - reported.hit_ratio == pytest.approx(summary.miss_ratio), name
        if name == policy:
            assert reported.elsewhere == 0


# -- live runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["live", "every-policy"])
def test_recorded_policies_come_out_as_they_did_live(name: str) -> None:
    """Measured: live.jsonl to the last request, every-policy.jsonl with 0.5 % more latency."""
    found = against(list(recorded(name)))
    real, reported = found.happened, found.recorded.figures
    assert reported.avg_latency_s == pytest.approx(real.avg_latency_s, rel=0.02)
    assert reported.p95_s == pytest.approx(real.p95_s, rel=0.02)
    assert reported.hit_ratio == pytest.approx(real.hit_ratio, abs=0.015)
    assert (reported.completed, reported.ended_otherwise) == (real.completed, real.ended_otherwise)
    assert reported.elsewhere <= 3


def test_worse_policy_comes_out_worse_on_a_live_run() -> None:
    found = against(list(recorded("every-policy")), "lalbo3", "rr")
    good, bad = outlook(found, "lalbo3"), outlook(found, "rr")
    assert bad.avg_latency_s > 2 * good.avg_latency_s
    assert bad.hit_ratio < good.hit_ratio - 0.3
    assert bad.evictions > 3 * good.evictions
    assert bad.false_misses > 2 * good.false_misses
    assert bad.completed == good.completed == found.happened.completed


def test_callers_of_a_live_run_that_left_before_their_model_was_there_do_not_wait() -> None:
    found = against(list(recorded("live")), "lalbo3", "rr")
    assert not found.callers_wait
    assert against(list(recorded("every-policy"))).callers_wait
    good, bad = outlook(found, "lalbo3"), outlook(found, "rr")
    assert bad.avg_latency_s > 1.3 * good.avg_latency_s
    assert bad.ended_otherwise["queue full"] > good.ended_otherwise["queue full"]


# -- whole recordings ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lalbo3", "gain"])
def test_every_request_of_a_wild_life_is_accounted_for(policy: str) -> None:
    """GPUs that come and go, failures, pins and contradictions: no column loses a request."""
    check_wild_life(policy, 5, ("lalbo3", "rr"))


def test_terms_are_compared_one_by_one() -> None:
    once = list(recorded("every-policy"))
    found, twice = against(once, "lb"), against(once + once, "lb")
    assert (found.terms, twice.terms) == (1, 2)
    assert twice.happened.requests == 2 * found.happened.requests
    assert outlook(twice, "lb").avg_latency_s == pytest.approx(outlook(found, "lb").avg_latency_s)
    assert outlook(twice, "lb").evictions == 2 * outlook(found, "lb").evictions


def test_recording_that_this_version_would_not_have_made_is_refused() -> None:
    entries = list(recorded("live"))
    del entries[4]
    with pytest.raises(BadRecording, match="this version decides otherwise"):
        against(entries)
    with pytest.raises(BadRecording, match="the recording is empty"):
        against([])
    with pytest.raises(BadRecording, match="before the beginning"):
        against(entries[1:])
