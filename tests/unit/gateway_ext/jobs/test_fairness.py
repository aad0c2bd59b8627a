"""Which lanes are served next."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway_ext.jobs.values import JobKind, JobLane, LaneHead
from gateway_ext.jobs.worker import LaneLimits, choose

LIMITS = LaneLimits(overall=8, per_lane=5)
COUNTS = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 4), max_size=5)


def lane(name: str) -> JobLane:
    return JobLane(JobKind.CALL, name)


def head(name: str, due_at_s: float = 0.0) -> LaneHead:
    return LaneHead(lane(name), due_at_s)


def chosen(heads: str, running: dict[str, int] | None = None) -> list[str]:
    has = {lane(name): count for name, count in (running or {}).items()}
    return [one.key for one in choose([head(name) for name in heads], has, LIMITS, 1.0)]


def test_lanes_take_turns() -> None:
    assert chosen("abc")[:3] == ["a", "b", "c"]


def test_lane_with_the_fewest_comes_first() -> None:
    assert chosen("ab", {"a": 3})[0] == "b"


def test_one_lane_alone_leaves_the_reserve_free() -> None:
    assert len(chosen("a")) == LIMITS.per_lane
    assert chosen("a", {"a": 2, "b": 4}) == []


def test_lane_in_which_nothing_runs_takes_a_place_of_the_reserve() -> None:
    assert chosen("ac", {"a": 2, "b": 4}) == ["c"]


def test_nothing_is_taken_before_it_is_due_and_the_longest_wait_goes_first() -> None:
    heads = [head("late", 2.0), head("b", 0.9), head("a", 1.0)]
    found = choose(heads, {}, LIMITS, 1.0)
    assert found[:2] == [lane("b"), lane("a")]
    assert lane("late") not in found


@given(st.sets(st.sampled_from("abcdefgh")), COUNTS)
def test_places_are_never_given_twice_and_none_is_left_to_a_lane_that_has_nothing(
    heads: set[str], running: dict[str, int]
) -> None:
    found = Counter(chosen("".join(sorted(heads)), running))
    free = LIMITS.overall - sum(running.values())
    assert sum(found.values()) <= max(0, free)
    for name, count in found.items():
        assert running.get(name, 0) + count <= LIMITS.per_lane
    left = free - sum(found.values())
    if left > 0:
        assert all(running.get(name, 0) or name in found for name in heads)
