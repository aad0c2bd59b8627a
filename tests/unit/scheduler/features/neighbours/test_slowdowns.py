"""What is learned of slowdowns from runs."""

from itertools import permutations
from random import Random

import pytest

from scheduler.features.neighbours import (
    LEAST,
    LEAST_OBSERVED,
    MOST,
    Metrics,
    Slowdowns,
    metrics_of,
)
from scheduler.model.values import METRICS


def drawn(count: int) -> list[Metrics]:
    random = Random(7)
    return [tuple(random.uniform(0.0, 10.0**place) for place in range(13)) for _ in range(count)]


def contended(own: Metrics, beside: Metrics) -> float:
    """As much slower as both use the first and the fourth of 13 resources."""
    return 1.0 + own[0] * beside[0] + 1e-6 * own[3] * beside[3]


def test_nothing_is_slower_until_enough_was_seen_or_with_nobody_beside() -> None:
    learned = Slowdowns()
    one, other = drawn(2)
    for _ in range(LEAST_OBSERVED - 1):
        learned.observe(one, [other], 2.0)
    assert learned.predict(one, [other]) == 1.0

    learned.observe(one, [other], 2.0)
    assert learned.predict(one, [other]) == pytest.approx(2.0, abs=0.05)
    assert learned.predict(one, []) == 1.0


def test_products_tell_partners_apart() -> None:
    models, learned = drawn(22), Slowdowns(window=400)
    for one, other in permutations(models[:20], 2):
        learned.observe(one, [other], contended(one, other))

    new, partner = models[20:]
    assert abs(learned.predict(new, [partner]) - contended(new, partner)) < 0.02
    assert len(learned.rows) == 380


def test_a_prediction_stays_within_its_bounds() -> None:
    learned = Slowdowns()
    one, other = drawn(2)
    for _ in range(20):
        learned.observe(one, [other], 50.0)
        learned.observe(other, [one], 0.01)
    assert learned.predict(one, [other]) == MOST
    assert learned.predict(other, [one]) == LEAST


def test_absurd_slowdowns_are_not_counted() -> None:
    learned = Slowdowns()
    one, other = drawn(2)
    for absurd in (0.0, -1.0, float("inf"), float("nan")):
        learned.observe(one, [other], absurd)
    assert not learned.rows


def test_the_window_bounds_what_is_kept() -> None:
    learned = Slowdowns(window=10)
    one, other = drawn(2)
    for _ in range(30):
        learned.observe(one, [other], 3.0)
    for _ in range(10):
        learned.observe(one, [other], 1.5)
    assert len(learned.rows) == 10
    assert {slowdown for _, _, slowdown in learned.rows} == {1.5}
    assert learned.predict(one, [other]) == pytest.approx(1.5, abs=0.05)


def test_nothing_is_said_of_errors_before_two_observations() -> None:
    learned = Slowdowns()
    one, other = drawn(2)
    for _ in range(2):
        assert learned.left_out_mse() is None
        learned.observe(one, [other], 2.0)
    assert learned.left_out_mse() == pytest.approx(0.0, abs=1e-2)


def test_metrics_are_taken_from_a_profile_only_if_all_are_there() -> None:
    features = {name: float(place) for place, name in enumerate(METRICS)}
    assert metrics_of(features) == tuple(float(place) for place in range(13))
    assert metrics_of({**features, "another": 1.0}) == metrics_of(features)
    for bad in (float("nan"), float("inf"), -1.0):
        assert metrics_of({**features, "ipc": bad}) is None
    del features["ipc"]
    assert metrics_of(features) is None
