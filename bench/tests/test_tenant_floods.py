"""The requests of tenants that go through the whole stack, and the table of what became of them."""

from bench.chapter.chapter_functions import addresses, deployments, emulated_line
from bench.tenants.__main__ import row
from bench.tenants.tenant_floods import LiveFlood, LiveTail, TenantLoads
from scheduler.sim.tenants.tenant_workloads import LOUD, TenantTraffic

TRAFFIC = TenantTraffic(quiet=2, functions=3, rate=10, minutes=2)


def test_each_function_is_in_the_namespace_of_its_tenant() -> None:
    load = TenantLoads(TRAFFIC, 1, emulated_line())
    found = deployments(load.all.models, load.namespaces)
    names = addresses(len(load.all.models), load.namespaces)

    assert [each["namespace"] for each in found] == 3 * ["quiet0"] + 3 * ["quiet1"] + 3 * [LOUD]
    assert [f"{each['service']}.{each['namespace']}" for each in found] == list(names)


def test_a_tenant_alone_sends_what_it_sends_beside_others() -> None:
    load = TenantLoads(TRAFFIC, 1, emulated_line())

    for tenant in load.quiet:
        beside = [each for each in load.all.arrivals if each[1].startswith(f"{tenant}/")]
        assert beside
        assert list(load.only(tenant).arrivals) == beside


def test_row_shows_how_many_times_as_long_the_tail_is() -> None:
    found = LiveFlood([LiveTail("a", 2.0, 3.0), LiveTail("b", 4.0, 4.0)], 0.9, 5.0, 1)

    assert row("fair", found) == (
        "| fair | 2.00, 3.00 s; 4.00, 4.00 s | 1.50 1.00 | 0.900 | 5.00 s | 1 |"
    )
