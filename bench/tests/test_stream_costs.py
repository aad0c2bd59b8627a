"""The bench of node streams: every way of sending is measured, and every message arrives."""

import pytest

from bench.stream_costs import Way, measured


@pytest.mark.timeout(180)
def test_every_way_costs_something_at_both_ends() -> None:
    found = dict(measured(rounds=1, messages=640))
    assert set(found) == set(Way)
    assert all(cost_s > 0 for costs in found.values() for cost_s in costs)
