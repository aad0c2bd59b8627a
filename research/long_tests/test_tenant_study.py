"""The study of tenants: its workloads, and what it finds in a small run."""

from pathlib import Path

import pytest

from research.reproduce import write_tenants
from research.tenants.experiments import ChosenPolicy, TenantPlan, evaluate_tenants
from research.tenants.workloads import (
    LOUD,
    TenantTraffic,
    saturating_workload,
    tenant_workload,
)
from scheduler.features.tenants.owners import namespace_of

_FAIR = ChosenPolicy("fair", {"lead_s": 1.0})
_PLAN = TenantPlan(
    [TenantTraffic(quiet=2, rate=60, minutes=3)],
    [ChosenPolicy("lalbo3", {}), _FAIR],
    seeds=1,
    weights={"one": 1.0, "two": 2.0, "four": 4.0},
)


def test_quiet_tenant_sends_the_same_when_the_loud_one_is_there() -> None:
    traffic = TenantTraffic()
    together = tenant_workload(traffic, 1)
    alone = tenant_workload(traffic, 1, ["quiet1"])
    own = [each for each in together.arrivals if each[1].startswith("quiet1/")]
    assert list(alone.arrivals) == own
    assert {namespace_of(each) for _, each in alone.arrivals} == {"quiet1"}
    assert tenant_workload(traffic, 2) != together


def test_loud_tenant_sends_ten_times_as_much_when_its_busiest_minute_counts() -> None:
    arrivals = tenant_workload(TenantTraffic(rate=40, loudness=10), 1).arrivals
    by_minute = [
        sum(int(at_s // 60) == minute for at_s, name in arrivals if name.startswith(LOUD))
        for minute in range(10)
    ]
    assert max(by_minute) == 400


def test_every_tenant_has_weights_of_its_own_when_models_are_alike() -> None:
    models = [each.id for each in tenant_workload(TenantTraffic(), 1).models]
    assert len(models) == len(set(models)) == 32
    saturated = saturating_workload({"a": 1.0, "b": 1.0}, 4, 10)
    assert {namespace_of(each) for _, each in saturated.arrivals} == {"a", "b"}


def test_turns_protect_quiet_tenants_and_give_shares_by_weight(tmp_path: Path) -> None:
    found = evaluate_tenants(_PLAN, lambda _: None)
    lalbo3, fair = found.floods
    assert min(tail.ratio for tail in lalbo3.tails) > 3.0
    assert max(tail.ratio for tail in fair.tails) < 1.6
    assert fair.hit_ratio > lalbo3.hit_ratio - 0.02
    shares = found.shares[1]
    for minute in (shares.first_minute, shares.second_minute):
        assert list(minute.values()) == pytest.approx([1 / 7, 2 / 7, 4 / 7], abs=0.05)
    assert shares.idle_share > 0.9
    page = write_tenants(tmp_path, _PLAN).read_text()
    assert page == write_tenants(tmp_path, _PLAN).read_text()
    assert "fair (lead_s 1)" in page
