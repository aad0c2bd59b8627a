"""What a batch costs each of its requests, and which one is chosen for it."""

from scheduler.model.values import Configuration
from scheduler.policies.weighing import BatchOption, Prices, StageProfile, batch_options, profile

PRICES = Prices(vcpu_hour=0.0, vgpu_hour=3600.0)  # a second of a vGPU costs 1
ONE, FAST, FOUR = Configuration(1, 1, 1), Configuration(1, 1, 4), Configuration(4, 1, 1)


def stage() -> StageProfile:
    return profile({ONE: 1.0, FAST: 0.5, FOUR: 2.0}, PRICES)


def first(*lefts_s: float) -> Configuration:
    return batch_options(stage(), lefts_s)[0].configuration


def test_cheapest_batch_is_chosen_when_all_have_time() -> None:
    assert first(*[10.0] * 4) == FOUR


def test_smaller_batch_is_chosen_when_the_large_one_makes_a_member_late() -> None:
    assert first(1.5, 10.0, 10.0, 10.0) == ONE


def test_more_is_paid_when_only_the_fastest_is_in_time() -> None:
    assert first(0.7) == FAST


def test_fastest_is_chosen_when_every_choice_is_late() -> None:
    assert first(0.4) == FAST


def test_place_near_the_data_comes_first_when_it_takes_longer_elsewhere() -> None:
    options = batch_options(stage(), [10.0], 0.5)

    assert options[0].is_near
    assert options.index(BatchOption(ONE, is_near=True)) < options.index(
        BatchOption(ONE, is_near=False)
    )


def test_place_elsewhere_is_avoided_when_the_way_makes_the_request_late() -> None:
    options = batch_options(stage(), [1.2], 0.5)

    assert options[:2] == [(ONE, True), (FAST, True)]
