"""How long leases of a function that claims none wait for it."""

from gpu_manager.node.leases import ClaimPatience, EndReason, SessionKey
from scheduler.api import LeaseId
from tests.kit.virtual_time import virtually
from tests.kit.worlds.ordered_node import ordered_node


def in_vain(patience: ClaimPatience, *leases: int, at_s: float = 0.0) -> float:
    for lease in leases:
        patience.in_vain("f", LeaseId(lease), at_s)
    return patience.of("f")


def test_each_lease_in_vain_halves_the_time_and_each_claimed_one_doubles_it() -> None:
    patience = ClaimPatience(1.0)
    assert patience.of("f") == 1.0
    assert in_vain(patience, 1) == 0.5
    assert in_vain(patience, 2, 3, 4, 5, 6) == 1.0 / 16
    assert patience.of("g") == 1.0
    for expected in (0.125, 0.25, 0.5, 1.0, 1.0):
        patience.claimed("f")
        assert patience.of("f") == expected


def test_session_that_is_only_too_late_for_the_shorter_time_makes_up_for_the_lease() -> None:
    patience = ClaimPatience(1.0)
    assert in_vain(patience, 1, 2, 3) == 0.125
    patience.in_vain("f", LeaseId(4), 10.0)  # after 0.125 s of it
    patience.asked_for(LeaseId(4), 10.8)
    assert patience.of("f") == 0.25, "more than that lease had"
    patience.asked_for(LeaseId(4), 10.8)
    patience.asked_for(LeaseId(99), 10.8)
    assert patience.of("f") == 0.25


def test_session_that_comes_after_the_usual_time_too_changes_nothing() -> None:
    patience = ClaimPatience(1.0)
    in_vain(patience, 1, 2, at_s=10.0)
    patience.asked_for(LeaseId(1), 10.1)  # it had all of the usual time
    patience.asked_for(LeaseId(2), 10.6)  # it had half of it
    assert patience.of("f") == 0.25


def test_what_it_remembers_is_bounded() -> None:
    patience = ClaimPatience(1.0)
    for number in range(5_000):
        patience.in_vain(f"f{number}", LeaseId(number), 0.0)
    assert patience.of("f0") == 1.0
    assert patience.of("f4999") == 0.5


@virtually
async def test_function_that_claims_none_of_its_leases_has_less_time_for_each() -> None:
    async with ordered_node() as it:
        leases, model = it.node.leases, it.add(16)
        await it.loaded(model)
        for lease in leases:
            leases.end(lease, EndReason.RELEASED)
        it.node.contended(waiting=True)
        for ends_s in (1.0, 0.5, 0.25, 0.125, 0.0625, 0.0625):
            it.grant(model, function="f")
            await it.advance(ends_s - 0.01)
            assert len(leases) == 1
            await it.advance(0.02)
            assert not len(leases)
        it.grant(model, function="g")
        await it.advance(0.9)
        assert len(leases) == 1
        await it.advance(0.2)

        own, given = it.grant(model, function="f").lease, it.grant(model, function="f").lease
        assert leases.claim(own, SessionKey("s"), ())
        assert leases.patience.of("f") == 0.0625, "a session's own lease says nothing"
        assert leases.claim(given, SessionKey("s"), (), given=True)
        assert leases.patience.of("f") == 0.125


@virtually
async def test_lease_that_ends_where_nobody_waits_costs_its_function_no_time() -> None:
    async with ordered_node() as it:
        it.grant(it.add(16), function="f")
        await it.advance(121.0)
        assert not len(it.node.leases)
        assert it.node.leases.patience.of("f") == 1.0
