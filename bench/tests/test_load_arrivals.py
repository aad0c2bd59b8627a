"""The functions that a load calls, and when."""

from collections import Counter
from pathlib import Path

import pytest

from bench.load.arrivals import Choices, at_rate, shares, traced
from gpufaas.errors import CommandError
from scheduler.model.errors import BadWorkload
from scheduler.sim.workload import Arrivals, Pattern

POISSON = Pattern(Arrivals.POISSON)
TRACE = """HashOwner,HashApp,HashFunction,Trigger,1,2,3
o,a,rare,http,1,0,2
o,a,often,http,6,4,8
o,a,never,http,0,0,0
"""


def test_shares_follow_zipf_and_sum_to_one() -> None:
    found = shares("zipf:2", 3)

    assert found == pytest.approx([36 / 49, 9 / 49, 4 / 49])
    assert shares("zipf", 4) == shares("zipf:1.0", 4)
    assert shares("zipf:0", 4) == shares("uniform", 4) == [0.25] * 4
    assert sum(shares("thesis", 20)) == pytest.approx(1.0)


@pytest.mark.parametrize("popularity", ["zip", "zipf:x", "zipf:-1", "zipf:nan", "uniform:1", ""])
def test_shares_name_a_popularity_that_is_none(popularity: str) -> None:
    with pytest.raises(CommandError, match="popularity"):
        shares(popularity, 3)


def test_calls_at_a_rate_are_so_many_in_order_and_by_their_shares() -> None:
    found = at_rate([0.75, 0.25], 100.0, 90.0, POISSON, seed=1)

    assert [at_s for at_s, _ in found] == sorted(at_s for at_s, _ in found)
    assert all(0.0 <= at_s < 90.0 for at_s, _ in found)
    assert len(found) == pytest.approx(9_000, rel=0.03)
    assert Counter(function for _, function in found)[0] / len(found) == pytest.approx(
        0.75, abs=0.02
    )


def test_calls_at_a_rate_are_evenly_spaced_when_uniform() -> None:
    found = at_rate([1.0], 4.0, 1.0, Pattern(Arrivals.UNIFORM), seed=1)

    assert found == [(0.0, 0), (0.25, 0), (0.5, 0), (0.75, 0)]


def test_the_same_seed_gives_the_same_calls_and_another_seed_others() -> None:
    first, same, other = (at_rate([0.5, 0.5], 10.0, 20.0, POISSON, seed) for seed in (1, 1, 2))

    assert first == same != other


def test_a_rate_that_gives_no_call_is_refused() -> None:
    with pytest.raises(CommandError, match="none at all"):
        at_rate([1.0], 0.001, 10.0, POISSON, seed=1)


def test_a_trace_is_replayed_by_use_and_faster(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TRACE)

    load = traced(str(tmp_path / "t.csv"), functions=2, start_minute=0, seconds=18.0, speed=10.0)
    found = load.arrivals(None, Pattern(Arrivals.UNIFORM), seed=1)

    assert Counter(function for _, function in found) == {0: 18, 1: 3}
    assert Counter(int(at_s / 6.0) for at_s, _ in found) == {0: 7, 1: 4, 2: 10}


def test_a_trace_is_scaled_to_the_rate_of_its_busiest_minute(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TRACE)

    load = traced(str(tmp_path / "t.csv"), functions=2, start_minute=0, seconds=18.0, speed=10.0)
    found = load.arrivals(5.0, Pattern(Arrivals.UNIFORM), seed=1)

    assert sum(at_s >= 12.0 for at_s, _ in found) == 30  # 5 a second in six seconds


def test_a_trace_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(TRACE)

    load = traced(str(tmp_path / "t.csv"), functions=2, start_minute=1, seconds=180.0, speed=1.0)

    with pytest.raises(BadWorkload, match="minutes 0 to 2"):
        load.arrivals(None, POISSON, seed=1)


def test_choices_follow_the_shares_and_the_seed() -> None:
    first, same = Choices([0.9, 0.1], 3), Choices([0.9, 0.1], 3)
    found = [next(first) for _ in range(5_000)]

    assert found == [next(same) for _ in range(5_000)]
    assert Counter(found)[0] / 5_000 == pytest.approx(0.9, abs=0.02)
