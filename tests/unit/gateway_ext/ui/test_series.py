"""Charts: a point every few seconds, and gaps while there were no watchers."""

from gateway_ext.ui.state import SERIES, Series, by_kind


def point(value: float) -> dict[str, float | None]:
    return dict.fromkeys(SERIES, value)


def shown(series: Series) -> list[float | None]:
    found = series.shown()["series"]
    assert isinstance(found, dict)
    values: list[float | None] = found["p50"]
    return values


def test_series_needs_a_point_every_step() -> None:
    series = Series(5.0, 10)
    assert series.due(100.0)
    series.add(point(1), 100.0)
    assert not series.due(104.9)
    assert series.due(105.0)


def test_series_forgets_what_is_too_old() -> None:
    series = Series(1.0, 3)
    for number in range(5):
        series.add(point(number), float(number))
    assert shown(series) == [2, 3, 4]


def test_series_has_gaps_for_missed_steps() -> None:
    series = Series(1.0, 10)
    series.add(point(1), 0.0)
    added = series.add(point(2), 4.2)
    assert shown(series) == [1, None, None, None, 2]
    assert by_kind(added)["p50"] == [None, None, None, 2]
    assert not series.due(4.9)
    assert series.due(5.1)


def test_series_of_a_long_sleep_is_no_longer_than_it_may_be() -> None:
    series = Series(1.0, 4)
    series.add(point(1), 0.0)
    added = series.add(point(2), 1e6)
    assert len(added) <= 5
    assert shown(series) == [None, None, None, 2]
    assert not series.due(1e6 + 0.5)


def test_series_keeps_its_pace_when_points_come_late() -> None:
    series = Series(5.0, 10)
    series.add(point(1), 0.0)
    series.add(point(2), 6.0)
    assert series.due(10.0)
