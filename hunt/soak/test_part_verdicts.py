"""The verdict of a soak on each part, of made series."""

from collections.abc import Callable
from random import Random

from hunt.soak.part_verdicts import overloaded, verdicts_of
from hunt.soak.soak_growth import SeriesGrowth, SeriesPoint, growth_of
from hunt.soak.soak_sampler import SeriesName

MIB = 1 << 20
MEMORY = SeriesName("gateway", "private bytes")


def growth(name: SeriesName, value: Callable[[float], float]) -> SeriesGrowth | None:
    """The growth of an hour's series with a little noise."""
    chance = Random(1)
    trembling = 0.01 * value(0.0)
    return growth_of(
        [
            SeriesPoint(at_s, value(at_s) + chance.gauss(0.0, trembling))
            for at_s in map(float, range(0, 3600, 10))
        ],
        name.resolution,
    )


def test_part_is_flat_when_nothing_of_it_grows() -> None:
    (found,) = verdicts_of({MEMORY: growth(MEMORY, lambda _: 80.0 * MIB)})

    assert found.text == "flat"
    assert found.row.startswith("| gateway | flat | ")
    assert "MiB (" in found.row
    assert found.row.endswith("| - | - |")


def test_part_grows_by_so_much_with_its_interval_when_its_memory_does() -> None:
    leak = growth(MEMORY, lambda at_s: (80.0 + 77.0 * at_s / 3600.0) * MIB)

    (found,) = verdicts_of({MEMORY: leak, SeriesName("gateway", "threads"): flat_count(10.0)})

    assert found.text == "**grows**"
    assert list(found.grown) == [MEMORY]
    assert leak is not None
    assert f"private bytes {leak.per_h / MIB:,.1f} MiB (" in found.row


def test_part_whose_noise_hides_growth_is_not_called_flat() -> None:
    chance = Random(2)
    noisy = SeriesName("functions", "private bytes")

    (found,) = verdicts_of(
        {noisy: growth(noisy, lambda _: 2_000.0 * MIB * (1.0 + chance.uniform(-0.9, 0.9)))}
    )

    assert found.text == "flat as far as is told"
    assert found.noisy == [noisy]


def test_memory_that_others_share_and_queues_are_no_growth_of_the_part() -> None:
    rising = growth(MEMORY, lambda at_s: (80.0 + at_s) * MIB)

    (found,) = verdicts_of(
        {
            SeriesName("gateway", "resident bytes"): rising,
            SeriesName("gateway", "calls in flight"): rising,
        }
    )

    assert found.text == "not judged"
    assert not found.grown


def test_queues_that_grow_say_that_the_load_was_too_much() -> None:
    waiting = SeriesName("scheduler", "waiting requests")
    longer = growth(waiting, lambda at_s: 5.0 + at_s / 10.0)

    (line,) = overloaded({waiting: longer, MEMORY: longer})

    assert line.startswith("scheduler: waiting requests ")
    assert overloaded({waiting: flat_count(3.0)}) == []


def test_part_with_too_few_samples_is_not_judged() -> None:
    (found,) = verdicts_of({MEMORY: None})

    assert found.text == "not judged"
    assert found.row == "| gateway | not judged |  | - | - |"


def flat_count(level: float) -> SeriesGrowth | None:
    name = SeriesName("any", "threads")
    points = [SeriesPoint(float(at_s), level) for at_s in range(0, 3600, 10)]
    return growth_of(points, name.resolution)
