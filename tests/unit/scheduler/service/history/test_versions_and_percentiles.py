"""Changes since an update, and percentiles of the last minute."""

import random
from statistics import quantiles

from hypothesis import given
from hypothesis import strategies as st

from scheduler.service.page_feed import Percentiles, Versions

VALUES = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 1))


@given(st.lists(VALUES, min_size=1, max_size=8), st.data())
def test_what_is_new_leads_from_any_look_to_the_last(
    looks: list[dict[str, int]], data: st.DataObject
) -> None:
    versions: Versions[int] = Versions()
    for number, look in enumerate(looks, start=1):
        versions.update(look, number)
    seen = data.draw(st.integers(0, len(looks)))
    known = dict(looks[seen - 1]) if seen else {}
    for gone in versions.gone_since(seen):
        known.pop(gone, None)
    known.update(versions.since(seen))
    assert known == looks[-1]
    assert versions.since(len(looks)) == {}
    assert versions.gone_since(len(looks)) == []


def test_versions_report_that_they_have_forgotten_too_much() -> None:
    versions: Versions[int] = Versions()
    versions.update({str(number): 0 for number in range(5_000)}, 1)
    versions.update({}, 2)
    assert not versions.has_changes_since(1)
    assert versions.has_changes_since(2)


def test_percentiles_are_off_by_a_hundredth_at_most() -> None:
    chance = random.Random(1)
    taken = [chance.lognormvariate(-1.0, 1.5) for _ in range(5_000)]
    times = Percentiles()
    for seconds in taken:
        times.add(seconds, 100.0)
    exact = quantiles(taken, n=100, method="inclusive")
    found = times.of((0.5, 0.95, 0.99), 100.0, 60.0)
    for value, truth in zip(found, (exact[49], exact[94], exact[98]), strict=True):
        assert value is not None
        assert abs(value / truth - 1) < 0.03


def test_percentiles_forget_what_is_older() -> None:
    times = Percentiles()
    times.add(1.0, 0.0)
    times.add(2.0, 50.0)
    times.add(3.0, 58.0)
    assert times.of((1.0, 0.01), 60.0, 10.0) != times.of((1.0, 0.01), 60.0, 60.0)
    (shortest,) = times.of((0.01,), 60.0, 60.0)
    assert shortest is not None
    assert abs(shortest - 1.0) < 0.02
    for at_s in range(60, 200, 5):
        times.add(5.0, float(at_s))
    (shortest,) = times.of((0.01,), 200.0, 1_000.0)
    assert shortest is not None
    assert abs(shortest - 5.0) < 0.1
    assert times.of((0.5,), 1_000.0, 60.0) == [None]
