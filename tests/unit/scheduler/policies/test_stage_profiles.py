"""The choices of a stage: what they cost, and which of them are of use."""

import pytest

from scheduler.model.values import Configuration
from scheduler.policies.weighing import Choice, Prices, profile, undominated


def test_undominated_keeps_what_fewer_than_so_many_others_beat() -> None:
    fast, worse, cheap = (
        Choice(1.0, 2.0, Configuration(1, 2, 1)),
        Choice(1.5, 3.0, Configuration(1, 3, 1)),
        Choice(2.0, 1.0, Configuration(1, 1, 1)),
    )

    assert undominated((cheap, worse, fast)) == [fast, cheap]
    assert undominated((cheap, worse, fast), 2) == [fast, worse, cheap]


def test_profile_costs_a_batch_by_its_members() -> None:
    prices = Prices(vcpu_hour=36.0, vgpu_hour=360.0)

    (choice,) = profile({Configuration(4, 2, 1): 2.0}, prices).choices

    assert choice.cost == pytest.approx((2 * 36.0 + 360.0) * 2.0 / 3600.0 / 4)


def test_profile_up_to_a_batch_has_no_larger_one() -> None:
    both = profile({Configuration(1, 1, 1): 1.0, Configuration(4, 1, 1): 2.0}, Prices(1.0, 1.0))

    assert [each.configuration.batch for each in both.up_to(3).choices] == [1]
    assert not both.up_to(0).choices
