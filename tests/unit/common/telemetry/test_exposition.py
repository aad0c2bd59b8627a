"""Metrics as text, read back by Prometheus's own parser; bounded names."""

import pytest
from hypothesis import given
from hypothesis import strategies as some
from prometheus_client.parser import text_string_to_metric_families

from common.telemetry.metrics import (
    OTHER,
    BoundedNames,
    Histogram,
    Metric,
    MetricKind,
    Values,
    gauge,
    page,
)

CALLS = Metric("calls_total", MetricKind.COUNTER, 'Calls: "all"\nof \\them', ("code", "function"))
LENGTH = Metric("length", MetricKind.GAUGE, "Of something")
TIMES = Metric("times_seconds", MetricKind.HISTOGRAM, "Times", ("who",), (0.1, 1, 10))


def read_back(*families: Values | Histogram) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = page(families).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@given(some.dictionaries(some.tuples(some.text(), some.text()), some.floats(0, 1e12)))
def test_values_are_read_as_they_were_written_whatever_the_labels_are(
    numbers: dict[tuple[str, str], float],
) -> None:
    values = Values(CALLS)
    for labels, number in numbers.items():
        values.add(labels, number)
    expected = {
        ("calls_total", frozenset({("code", code), ("function", function)})): number
        for (code, function), number in numbers.items()
    }
    assert read_back(values) == expected


def test_value_without_labels_is_there_from_the_start() -> None:
    assert read_back(Values(LENGTH)) == {("length", frozenset()): 0.0}


def test_values_of_equal_labels_add_up() -> None:
    found = gauge(CALLS, [(("200", "f"), 1), (("200", "f"), 2)])
    assert found.values == {("200", "f"): 3.0}


def test_page_describes_each_metric() -> None:
    lines = page([Values(CALLS)]).decode().splitlines()
    assert lines == [
        '# HELP calls_total Calls: "all"\\nof \\\\them',
        "# TYPE calls_total counter",
    ]


def test_histogram_has_buckets_that_add_up() -> None:
    times = Histogram(TIMES)
    for seconds in (0.05, 0.1, 0.5, 20.0):
        times.add(("me",), seconds)
    found = read_back(times)
    buckets = {
        dict(labels)["le"]: value for (name, labels), value in found.items() if "_bucket" in name
    }
    assert buckets == {"0.1": 2, "1.0": 3, "10.0": 3, "+Inf": 4}
    who = frozenset({("who", "me")})
    assert found["times_seconds_count", who] == 4
    assert found["times_seconds_sum", who] == pytest.approx(20.65)


def test_what_is_forgotten_is_gone_and_the_rest_stays() -> None:
    values, times = Values(CALLS), Histogram(TIMES)
    values.add(("200", "f"))
    values.add(("200", "g"))
    times.add(("f",), 1.0)
    values.forget("function", "f")
    times.forget("who", "f")
    assert list(values.values) == [("200", "g")]
    assert read_back(times) == {}


def test_names_beyond_the_bound_are_other_until_there_is_room() -> None:
    names = BoundedNames(2)
    assert [names.of(name) for name in "abcab"] == ["a", "b", OTHER, "a", "b"]
    names.forget("a")
    assert names.of("c") == "c"
    assert names.of("a") == OTHER


def test_sweep_forgets_what_was_not_met_since_the_last_one() -> None:
    names = BoundedNames(2)
    names.of("a")
    names.of("b")
    assert names.sweep() == []
    names.of("b")
    assert names.sweep() == ["a"]
    assert list(names) == ["b"]
    assert names.sweep() == ["b"]
