"""Which two jobs are paired, by each order."""

import pytest

from research.interference.pair_choice import (
    PairedJob,
    greedy,
    in_order,
    most_saved,
    mystic,
    shortest_first,
    together_s,
)

SLOW = {("a", "b"): 1.1, ("b", "a"): 1.1, ("a", "c"): 1.0, ("c", "a"): 1.2}


def slowdown(one: PairedJob, other: PairedJob) -> float:
    return SLOW.get((one.name, other.name), 3.0)


def job(name: str, seconds: float = 10.0, gb: float = 4.0, *metrics: float) -> PairedJob:
    return PairedJob(name, seconds, gb, metrics)


def test_greedy_takes_the_pair_of_even_and_small_slowdowns_that_fits() -> None:
    waiting = [job("a"), job("b"), job("c")]
    assert [each.name for each in greedy(slowdown)(waiting, 12.0).jobs] == ["a", "b"]

    waiting[1] = job("b", gb=9.0)
    assert [each.name for each in greedy(slowdown)(waiting, 12.0).jobs] == ["a", "c"]


@pytest.mark.parametrize("chooser", [greedy(slowdown), shortest_first, in_order, mystic])
def test_a_job_runs_alone_if_nothing_fits_beside_it(chooser: object) -> None:
    assert callable(chooser)
    chosen = chooser([job("a", gb=8.0, seconds=1.0), job("b", gb=8.0)], 12.0)
    assert [each.name for each in chosen.jobs] == ["a"]
    assert [each.name for each in chooser([job("a")], 12.0).jobs] == ["a"]


def test_sjf_takes_the_two_shortest_and_mystic_the_least_alike() -> None:
    waiting = [job("a", 3.0, 1.0, 0.1), job("b", 1.0, 1.0, 0.2), job("c", 2.0, 1.0, 0.9)]
    assert [each.name for each in shortest_first(waiting, 12.0).jobs] == ["b", "c"]
    assert [each.name for each in mystic(waiting, 12.0).jobs] == ["a", "c"]
    assert [each.name for each in in_order(waiting, 12.0).jobs] == ["a", "b"]


def test_ours_takes_the_longest_with_whoever_saves_most_or_alone() -> None:
    waiting = [job("b", 5.0), job("a", 20.0), job("c", 15.0)]
    chosen = most_saved(slowdown)(waiting, 12.0)
    assert [each.name for each in chosen.jobs] == ["a", "c"]
    alone = most_saved(slowdown)([job("b", 20.0), job("c", 20.0)], 12.0)
    assert (len(alone.jobs), alone.reason) == (1, "no partner saves time")


def test_the_longer_job_is_as_fast_as_ever_after_the_shorter_one_has_ended() -> None:
    one, other = job("a", 10.0), job("c", 30.0)  # a: 1.0 times; c: 1.2 times as long
    assert together_s(one, other, slowdown) == pytest.approx((10.0, 30.0 + 10.0 - 10.0 / 1.2))
    assert together_s(other, one, slowdown) == pytest.approx((30.0 + 10.0 - 10.0 / 1.2, 10.0))
