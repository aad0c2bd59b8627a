"""What a load counts, and how it is shown."""

import json
from dataclasses import astuple

import pytest

from bench.load.load_run import LoadOutcome
from bench.load.result_text import as_json, result_text
from bench.load.statistics import CacheCounts, CallTally, latency


def tally(*calls: tuple[int, float, int], begun: int | None = None) -> CallTally:
    """Calls (function, latency, status) that were due one second after the other."""
    found = CallTally(("a", "b"))
    for number, (function, latency_s, status) in enumerate(calls):
        found.add(function, float(number), latency_s, status, "gone" if not status else "")
    found.begun = len(calls) if begun is None else begun
    return found


MIXED = ((0, 0.010, 200), (0, 0.030, 202), (1, 0.001, 429), (1, 5.0, 0))


def test_figures_count_statuses_and_time_only_what_succeeded() -> None:
    found = tally(*MIXED).figures()

    assert (found.calls, found.succeeded) == (4, 2)
    assert found.statuses == {"no answer": 1, "200": 1, "202": 1, "429": 1}
    assert found.latency is not None
    assert found.latency.p50_s == pytest.approx(0.020)
    assert found.latency.max_s == 0.030


def test_figures_are_apart_for_each_function_that_was_called() -> None:
    found = tally(*MIXED).by_function()

    assert {name: (one.calls, one.succeeded) for name, one in found.items()} == {
        "a": (2, 2),
        "b": (2, 0),
    }
    assert found["b"].latency is None
    assert list(tally((1, 0.1, 200)).by_function()) == ["b"]


def test_calls_that_never_ended_are_unfinished() -> None:
    assert tally(*MIXED, begun=7).unfinished == 3


def test_lately_leaves_out_what_was_seen_before() -> None:
    good, failed = tally(*MIXED).latest(since=1)

    assert (good, failed) == ([0.030], 2)


def test_latency_is_percentiles_and_none_of_nothing() -> None:
    found = latency(number / 100 for number in range(101))

    assert found is not None
    assert astuple(found) == pytest.approx((0.5, 0.9, 0.95, 0.99, 1.0, 0.5))
    assert latency([]) is None


def test_the_cache_counts_from_the_beginning_and_again_after_another_leader() -> None:
    before = CacheCounts(100, 20, 5)

    assert CacheCounts(130, 30, 6).since(before) == CacheCounts(30, 10, 1)
    assert CacheCounts(30, 10, 1).hit_ratio == 0.75
    assert CacheCounts(7, 1, 0).since(before) == CacheCounts(7, 1, 0)
    assert CacheCounts(0, 0, 0).hit_ratio is None


def test_json_has_the_documented_keys() -> None:
    found = as_json(LoadOutcome(tally(*MIXED), elapsed_s=4.0), CacheCounts(3, 1, 0), "out/load.png")

    assert json.loads(json.dumps(found)) == found
    assert list(found) == [
        "elapsed_s",
        "stopped",
        "unfinished",
        "calls",
        "succeeded",
        "throughput",
        "statuses",
        "latency",
        "reasons",
        "functions",
        "cache",
        "generator",
        "picture",
    ]
    assert (found["throughput"], found["reasons"]) == (0.5, {"gone": 1})
    assert found["cache"] == {"hits": 3, "misses": 1, "evictions": 0, "hit_ratio": 0.75}


def test_text_names_failures_and_their_reasons() -> None:
    text = result_text(LoadOutcome(tally(*MIXED), elapsed_s=4.0), CacheCounts(3, 1, 0))

    assert "4 calls in 4.0 s: 0.5 answered well a second" in text
    assert "1 x no answer" in text
    assert "1 x gone" in text
    assert "hit ratio 0.750 (3 hits, 1 misses)" in text
    assert "This generator" not in text


def test_words_doubt_the_figures_when_the_generator_was_late_or_busy() -> None:
    outcome = LoadOutcome(tally((0, 0.1, 200)), elapsed_s=1.0, cpu_s=0.95)
    outcome.late_s.append(0.02)

    text = result_text(outcome, None)

    assert "20.00 ms late" in text
    assert "95% of a core" in text
