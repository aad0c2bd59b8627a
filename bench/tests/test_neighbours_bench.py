"""The bench of models at once: job lists, orders in pairs, training pairs; models answer alike."""

import pytest

from bench.neighbours import training
from bench.neighbours.job_node import CallsDone, CallsJob
from bench.neighbours.makespans import (
    OURS,
    PAIRS,
    RANDOM,
    OrderFacts,
    all_at_once_s,
    choosers,
    drawn_list,
    in_pairs_s,
    normalised,
)

ALONE_S = {"a": 0.01, "b": 0.02, "c": 0.04}
FACTS = OrderFacts(dict.fromkeys(ALONE_S, 1.0), dict.fromkeys(ALONE_S, (0.5,)))


class BegunJobs:
    """RunsJobs nothing, and remembers what was begun at once."""

    def __init__(self) -> None:
        self.begun: list[list[CallsJob]] = [[]]
        self._open: list[CallsJob] = []

    def begin(self, job: CallsJob) -> None:
        self.begun[-1].append(job)
        self._open.append(job)

    def next_done(self) -> CallsDone:
        done = self._open.pop(0)
        if not self._open:
            self.begun.append([])
        return CallsDone(done.name, done.alone_s)


def test_lists_are_drawn_alike_by_the_same_seed_and_of_the_length_that_was_asked_for() -> None:
    chosen = drawn_list(ALONE_S, 12, 0.8, 3)
    assert chosen == drawn_list(ALONE_S, 12, 0.8, 3)
    assert chosen.jobs != drawn_list(ALONE_S, 12, 0.8, 4).jobs
    assert sum(job.alone_s for job in chosen.jobs) == pytest.approx(12 * 0.8, rel=0.05)
    assert sorted(job.model for job in chosen.jobs) == sorted("abc" * 4)
    assert all(job.alone_s == job.calls * ALONE_S[job.model] for job in chosen.jobs)


@pytest.mark.parametrize("order", [PAIRS, OURS, RANDOM])
def test_every_job_runs_once_and_no_more_than_two_at_once(order: str) -> None:
    chosen, runs = drawn_list(ALONE_S, 9, 0.5, 1), BegunJobs()
    choose = choosers(lambda one, other: 1.0 + (one == other))[order]
    assert in_pairs_s(runs, chosen, choose, FACTS, 2.0) >= 0.0
    begun = [job for together in runs.begun for job in together]
    assert sorted(begun) == sorted(chosen.jobs)
    assert max(map(len, runs.begun)) == 2


def test_pairs_avoid_models_that_disturb_each_other() -> None:
    chosen, runs = drawn_list({"a": 0.01, "b": 0.02}, 4, 0.5, 1), BegunJobs()
    slowdowns = {("a", "b"): 1.8, ("b", "a"): 1.8, ("a", "a"): 1.1, ("b", "b"): 1.1}
    choose = choosers(lambda one, other: slowdowns[one, other])[PAIRS]
    facts = OrderFacts({"a": 1.0, "b": 1.0}, {"a": (0.5,), "b": (0.5,)})
    in_pairs_s(runs, chosen, choose, facts, 2.0)
    for together in runs.begun[:2]:
        assert len({job.model for job in together}) == 1


def test_all_jobs_begin_at_once_where_the_policy_chooses() -> None:
    chosen, runs = drawn_list(ALONE_S, 5, 0.5, 1), BegunJobs()
    all_at_once_s(runs, chosen)
    assert runs.begun[0] == list(chosen.jobs)


def test_pairs_that_are_held_out_are_not_trained_on() -> None:
    trained, held_out = training.split_pairs("abcdef", 0.33, 5)
    assert (len(trained), len(held_out)) == (10, 5)
    assert not set(trained) & set(held_out)
    assert (trained, held_out) == training.split_pairs("abcdef", 0.33, 5)


def test_metrics_are_shares_of_the_largest() -> None:
    assert normalised({"a": (1.0, 0.0), "b": (4.0, 0.0)}) == {"a": (0.25, 0.0), "b": (1.0, 0.0)}
