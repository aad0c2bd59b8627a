"""The search for the largest rate, and what is read of LoadGen's summary."""

import pytest

from bench.gateway.loadgen_rates import LoadgenResult, largest_rate, read_summary

_SUMMARY = """\
================================================
MLPerf Results Summary
================================================
Scenario : Server
Completed samples per second    : 197.52
Result is : {result}
  Early stopping satisfied: Yes
99.00 percentile latency (ns)   : 11196845
99.90 percentile latency (ns)   : 14126522
"""


@pytest.mark.parametrize(("result", "valid"), [("VALID", True), ("INVALID", False)])
def test_summary_says_whether_a_test_counts(result: str, *, valid: bool) -> None:
    assert read_summary(_SUMMARY.format(result=result)) == LoadgenResult(valid, 0.011196845)


@pytest.mark.parametrize("limit", [40.0, 100.0, 128.0, 1_000.0, 7_000.0])
def test_search_ends_within_a_tenth_below_the_limit(limit: float) -> None:
    found = largest_rate(lambda rate: LoadgenResult(rate <= limit, rate / 1e6))

    assert limit / 1.1 <= found.rate <= limit
    assert found.p99_s == found.rate / 1e6


def test_search_finds_no_rate_when_no_test_counts() -> None:
    found = largest_rate(lambda _: LoadgenResult(valid=False, p99_s=1.0))

    assert found.rate == 0.0
    assert found.p99_s == 0.0


def test_search_tests_a_rate_again_when_it_did_not_count() -> None:
    rates: list[float] = []

    def fail_at_first(rate: float) -> LoadgenResult:
        rates.append(rate)
        return LoadgenResult(rates.count(rate) > 1 and rate <= 128.0, 0.01)

    assert largest_rate(fail_at_first).rate == 128.0
    assert all(rates.count(rate) == 2 for rate in rates)
