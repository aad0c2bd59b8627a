"""Random lives of clusters whose namespaces and functions have weights, priorities and quotas."""

from random import Random

from hypothesis import strategies as st
from msgspec.structs import replace

from cache_manager.model.ids import MIB, tenant_of
from scheduler import policies
from scheduler.model import events
from scheduler.model.events import Event
from scheduler.model.owner_terms import OwnerTerms
from tests.kit.cores.random_lives import KINDS, Chaos, Operation
from tests.kit.cores.random_workloads import flat

SPACES = ("t0", "t1")
TENANT_KINDS = (*KINDS, *("terms",) * 4)
_LEADS = (0.0, 0.05, 1.0, 8.0)
_TERMS = (
    None,
    OwnerTerms(),
    OwnerTerms(weight=4.0),
    OwnerTerms(weight=0.25, priority=3),
    OwnerTerms(leases=1),
    OwnerTerms(leases=2, priority=-2),
    OwnerTerms(leases=0),
    OwnerTerms(waiting=2),
    OwnerTerms(gpu_s=3.0, window_s=6.0),
    OwnerTerms(gpu_s=0.4, window_s=2.0, waiting=4),
    OwnerTerms(gpu_s=1.0, window_s=30.0),
    OwnerTerms(resident_bytes=3000 * MIB),
    OwnerTerms(resident_bytes=6000 * MIB, leases=3),
    OwnerTerms(resident_bytes=1500 * MIB, weight=2.0),
    OwnerTerms(leases=1, waiting=3, gpu_s=9.0, resident_bytes=5500 * MIB),
)

_bursts = st.lists(
    st.tuples(
        st.sampled_from(TENANT_KINDS), st.integers(0, 63), st.integers(0, 63), st.integers(0, 400)
    ),
    min_size=1,
    max_size=20,
)
tenant_operations = st.lists(_bursts, min_size=1, max_size=10).map(flat)


def random_tenant_operations(random: Random, count: int) -> list[Operation]:
    """A long list of operations."""
    return [
        (
            random.choice(TENANT_KINDS),
            random.randrange(4096),
            random.randrange(4096),
            random.randrange(99),
        )
        for _ in range(count)
    ]


class TenantChaos(Chaos):
    """The same life, with requests of several namespaces, and terms that change."""

    def _arrive(self, who: int, how: int) -> Event:
        event = super()._arrive(who, how)
        assert isinstance(event, events.RequestArrived)
        request = event.request
        space = tenant_of(request.models[0])
        own = tuple(each for each in request.models if tenant_of(each) == space)
        slo_s = how / 8 if how % 5 == 0 else None
        return events.RequestArrived(
            replace(
                request,
                models=own,
                function=f"{space}/f{who % 2}" if who % 9 else "alone",
                priority=(0, 0, 0, 2, -1, 30)[how % 6],
                slo_s=slo_s,
                goes_on=(who + how) % 3 == 0,
            )
        )

    def _terms(self, who: int, how: int) -> Event:
        space = SPACES[who % len(SPACES)]
        owner = (space, f"{space}/f{how % 2}", "")[(who + how) % 3]
        return events.TermsSet(owner, _TERMS[how % len(_TERMS)])

    def _policy(self, who: int, how: int) -> Event:
        names = (*policies.available(), "fair", "fair")
        name = names[who % len(names)]
        chosen: dict[str, float] = {}
        if policies.takes(name, "o3_limit"):
            chosen["o3_limit"] = how % 5
        if policies.takes(name, "lead_s"):
            chosen["lead_s"] = _LEADS[how % len(_LEADS)]
        return events.PolicySet(name, chosen)
