"""The routes of owners' terms: what they take, what they show, who may change them."""

import pytest

from scheduler.features.tenants.tenancy import Tenancy
from scheduler.model.owner_terms import OwnerTerms
from scheduler.service.access import ApiRole
from tests.kit.worlds.service_world import leading

pytestmark = pytest.mark.timeout(180, func_only=True)


async def test_terms_are_set_shown_and_removed() -> None:
    async with leading() as world:
        assert world.office is not None
        terms = {"weight": 2, "leases": 3, "gpu_s": 30, "window_s": 10.5}
        said = await world.ask("PUT", "/quotas/team", terms)
        assert said.status == 200
        assert said.body["set_by"] == "operator"
        assert said.body["terms"] == {
            "weight": 2.0, "priority": 0, "gpu_s": 30.0, "window_s": 10.5,
            "resident_bytes": None, "leases": 3, "waiting": None,
        }  # fmt: skip
        expected = OwnerTerms(weight=2.0, gpu_s=30.0, window_s=10.5, leases=3)
        assert world.office.core.layer(Tenancy).owners.terms == {"team": expected}
        assert (await world.get("/quotas")).body == {"owners": [said.body]}
        assert (await world.get("/quotas/team")).body == said.body
        removed = await world.ask("DELETE", "/quotas/team")
        assert (removed.status, removed.body["set_by"]) == (200, "")
        assert world.office.core.layer(Tenancy).owners.terms == {}
        again = await world.ask("DELETE", "/quotas/team")
        assert (again.status, again.body["error"]) == (404, "unknown")


async def test_setting_replaces_all_terms_of_the_owner() -> None:
    async with leading() as world:
        assert world.office is not None
        await world.ask("PUT", "/quotas/team/reader", {"weight": 2.0, "leases": 3})
        await world.ask("PUT", "/quotas/team/reader", {"waiting": 5})
        assert world.office.core.layer(Tenancy).owners.terms == {
            "team/reader": OwnerTerms(waiting=5)
        }


BAD_TERMS: tuple[tuple[str, object, str], ...] = (
    ("team", {"weight": 0}, "weight"),
    ("team", {"weight": "2"}, "weight"),
    ("team", {"weight": 1e300}, "weight"),
    ("team", {"weight": None}, "weight"),
    ("team", {"leases": 0}, "leases"),
    ("team", {"leases": 1.5}, "leases"),
    ("team", {"leases": True}, "leases"),
    ("team", {"waiting": 10**30}, "waiting"),
    ("team", {"gpu_s": -1.0}, "gpu_s"),
    ("team", {"window_s": 1e9}, "window_s"),
    ("team", {"resident_bytes": -5}, "resident_bytes"),
    ("team", {"priority": 10**7}, "priority"),
    ("team", {"lease": 3}, "lease"),
    ("team", [], "body"),
    ("team", b'{"weight": NaN}', "weight"),
    ("team/a/b", {}, "owner"),
    ("team%09", {}, "owner"),
)


async def test_bad_terms_are_refused_by_name() -> None:
    wrong = []
    async with leading() as world:
        assert world.office is not None
        for owner, body, named in BAD_TERMS:
            said = await world.ask("PUT", f"/quotas/{owner}", body)
            terms = dict(world.office.core.layer(Tenancy).owners.terms)
            refused = said.status == 400 and said.body["error"] == "bad-request"
            if not refused or named not in said.body["message"] or terms:
                wrong.append((owner, body, said, terms))
    assert wrong == []


async def test_caller_may_look_and_not_change() -> None:
    async with leading(role=ApiRole.CALLER) as world:
        assert (await world.get("/quotas")).body == {"owners": []}
        assert (await world.ask("PUT", "/quotas/team", {})).status == 403
        assert (await world.ask("DELETE", "/quotas/team")).status == 403


async def test_use_is_shown_beside_the_terms() -> None:
    async with leading() as world:
        await world.ask("PUT", "/quotas/team", {"leases": 5})
        lease = (await world.acquire("r")).body["lease"]
        for owner in ("team", "team/reader"):
            use = (await world.get(f"/quotas/{owner}")).body["use"]
            assert (use["leases"], use["waiting"]) == (1, 0)
        other = (await world.get("/quotas/other")).body
        assert (other["set_by"], other["use"]["leases"]) == ("", 0)
        metrics = (await world.get("/metrics")).body
        assert 'gpufaas_scheduler_owner_used{owner="team",quota="leases"} 1' in metrics
        assert 'gpufaas_scheduler_owner_limit{owner="team",quota="leases"} 5' in metrics
        assert 'quota="waiting"} 0' in metrics
        assert 'gpufaas_scheduler_owner_limit{owner="team",quota="waiting"}' not in metrics
        assert 'gpufaas_scheduler_owner_weight{owner="team"} 1' in metrics
        feed = (await world.get("/feed?since=")).body["owners"]
        assert (feed["count"], feed["rows"][0]["owner"]) == (1, "team")
        await world.release(lease)


async def test_at_most_so_many_owners_have_metrics() -> None:
    async with leading(metric_names=2) as world:
        for owner in ("c", "a", "b"):
            await world.ask("PUT", f"/quotas/{owner}", {})
        metrics = (await world.get("/metrics")).body
        assert 'owner_weight{owner="a"}' in metrics
        assert 'owner_weight{owner="c"}' not in metrics
