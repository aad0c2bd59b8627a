"""The judgement of a soak: a leak is found, noise, steps and the teeth of a saw are none."""

from collections.abc import Callable
from random import Random

import pytest

from hunt.soak.soak_growth import SeriesGrowth, SeriesPoint, growth_of

HOUR_S, EVERY_S = 3600.0, 5.0
LEVEL, MOST_SEEDS = 1000.0, 100


def a_series(
    value: Callable[[float], float], seconds: float = HOUR_S, every_s: float = EVERY_S
) -> list[SeriesPoint]:
    count = int(seconds / every_s)
    return [SeriesPoint(number * every_s, value(number * every_s)) for number in range(count)]


def judged(points: list[SeriesPoint], resolution: float = 2.0) -> SeriesGrowth:
    found = growth_of(points, resolution)
    assert found is not None
    return found


def flat(noisy: Callable[[float], float]) -> SeriesGrowth:
    return judged(a_series(lambda at_s: LEVEL + noisy(at_s)))


def noise(seed: int, wide: float) -> Callable[[float], float]:
    chance = Random(seed)
    return lambda _at_s: chance.gauss(0.0, wide)


def wandering(seed: int, memory: float) -> Callable[[float], float]:
    """Noise of which a share stays from one block of the judged half to the next."""
    chance, blocks = Random(seed), [0.0]
    for _ in range(40):
        blocks.append(memory * blocks[-1] + chance.gauss(0.0, 10.0))
    return lambda at_s: blocks[int(at_s / HOUR_S * 40)] + chance.gauss(0.0, 0.1)


def test_leak_is_found_with_its_slope_under_noise() -> None:
    noisy = noise(1, 10.0)

    found = judged(a_series(lambda at_s: LEVEL + 60.0 * at_s / HOUR_S + noisy(at_s)))

    assert found.grows
    assert found.per_h == pytest.approx(60.0, rel=0.2)
    assert found.low_per_h < 60.0 < found.high_per_h


def test_leak_of_whole_pieces_is_found_when_there_are_a_few_in_the_judged_half() -> None:
    found = judged(a_series(lambda at_s: 50.0 + at_s // 300.0))  # a descriptor in five minutes

    assert found.grows
    assert found.per_h == pytest.approx(12.0, rel=0.25)


@pytest.mark.parametrize("wide", [0.0, 1.0, 30.0, 300.0])
def test_noisy_flat_series_does_not_grow(wide: float) -> None:
    grown = [seed for seed in range(MOST_SEEDS) if flat(noise(seed, wide)).grows]

    assert grown == []


@pytest.mark.parametrize("period_s", [7.0, 60.0, 240.0, 600.0])
def test_saw_of_a_garbage_collector_does_not_grow(period_s: float) -> None:
    found = judged(a_series(lambda at_s: LEVEL + 400.0 * (at_s % period_s) / period_s))

    assert not found.grows


def test_leak_below_a_saw_is_found() -> None:
    found = judged(
        a_series(lambda at_s: LEVEL + 200.0 * at_s / HOUR_S + 100.0 * (at_s % 45.0) / 45.0)
    )

    assert found.grows
    assert found.per_h == pytest.approx(200.0, rel=0.2)


def test_single_step_and_single_peaks_do_not_grow() -> None:
    assert not judged(a_series(lambda at_s: LEVEL + (200.0 if at_s > 2700.0 else 0.0))).grows
    assert not judged(a_series(lambda at_s: LEVEL + (9e9 if at_s % 500.0 < 6.0 else 0.0))).grows


def test_what_grows_only_while_it_warms_up_does_not_grow() -> None:
    assert not judged(a_series(lambda at_s: LEVEL * min(1.0, at_s / 1700.0))).grows


def test_what_shrinks_does_not_grow() -> None:
    found = judged(a_series(lambda at_s: LEVEL - 100.0 * at_s / HOUR_S))

    assert not found.grows
    assert found.per_h == pytest.approx(-100.0, rel=0.01)


def test_growth_below_what_is_allowed_is_none_but_shown() -> None:
    found = judged(a_series(lambda at_s: LEVEL + 9.0 * at_s / HOUR_S))  # under 1 % an hour

    assert found.low_per_h > 0.0
    assert found.allowed_per_h == pytest.approx(10.0, rel=0.02)
    assert not found.grows


def test_growth_below_the_resolution_of_a_short_run_is_none() -> None:
    short = a_series(lambda at_s: 10.0 + 1.5 * at_s / 600.0, seconds=600.0)

    assert not judged(short, resolution=2.0).grows
    assert judged(short, resolution=0.5).grows


def test_series_that_is_short_or_has_gaps_is_not_judged() -> None:
    assert growth_of([], 1.0) is None
    assert growth_of(a_series(lambda _: 1.0, seconds=120.0), 1.0) is None
    gap = [point for point in a_series(lambda _: 1.0) if not 2000.0 < point.at_s < 2500.0]
    assert growth_of(gap, 1.0) is None


@pytest.mark.parametrize(("memory", "most"), [(0.3, 1), (0.7, 4), (0.9, 8), (1.0, 15)])
def test_noise_that_wanders_seldom_grows(memory: float, most: int) -> None:
    """Of a hundred; 25 of those that never forget would, if that were not taken for noise."""
    grown = [seed for seed in range(MOST_SEEDS) if flat(wandering(seed, memory)).grows]

    assert len(grown) <= most


def test_leak_is_found_under_noise_that_wanders_a_little() -> None:
    noisy = wandering(3, 0.5)

    found = judged(a_series(lambda at_s: LEVEL + 400.0 * at_s / HOUR_S + noisy(at_s)))

    assert found.grows
    assert found.low_per_h < 400.0 < found.high_per_h


def test_wandering_noise_widens_the_interval() -> None:
    wanders = flat(wandering(1, 0.95))
    trembles = flat(noise(1, 10.0))

    assert wanders.high_per_h - wanders.low_per_h > 3.0 * (trembles.high_per_h - trembles.low_per_h)


def test_what_may_grow_much_within_its_noise_is_not_called_flat() -> None:
    quiet, loud = flat(noise(1, 1.0)), flat(noise(1, 3_000.0))

    assert quiet.is_flat
    assert not quiet.grows
    assert not loud.is_flat
    assert not loud.grows
