"""Which multiprocessors a model's share is made of, over a stand-in for the driver."""

import pytest

from gpu_manager.call_errors import ShareRefused
from gpu_manager.cuda.sm_partitions import SmPartitions
from tests.kit.fakes.fake_driver import FakeDriver


@pytest.mark.parametrize(
    ("share", "groups"), [(0.25, 4), (0.5, 8), (0.06, 1), (0.001, 1), (0.999, 16), (0.1, 2)]
)
def test_a_share_is_about_as_many_groups_and_at_least_one(share: float, groups: int) -> None:
    found = SmPartitions(FakeDriver(132, 8)).take(share)
    assert (found.groups, found.multiprocessors) == (groups, 8 * groups)


def test_models_have_multiprocessors_of_their_own_while_there_are_enough() -> None:
    driver = FakeDriver(64, 8)
    partitions = SmPartitions(driver)
    taken = [partitions.take(0.25) for _ in range(4)]
    assert [driver.contexts[each.stream] for each in taken] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert driver.splits == 1  # groups of different splits may overlap

    fifth = partitions.take(0.5)
    assert driver.contexts[fifth.stream] == [0, 1, 2, 3]


def test_groups_of_a_model_that_left_are_taken_first_with_their_stream() -> None:
    driver = FakeDriver(64, 8)
    partitions = SmPartitions(driver)
    first, second = partitions.take(0.5), partitions.take(0.5)
    partitions.give_back(second)
    again = partitions.take(0.5)
    assert again.stream == second.stream != first.stream
    assert len(driver.contexts) == 2


def test_models_of_the_same_groups_have_streams_of_their_own() -> None:
    partitions = SmPartitions(FakeDriver(64, 8))
    whole = [partitions.take(0.9) for _ in range(3)]
    assert len({each.stream for each in whole}) == 3
    assert {each.first for each in whole} <= {0, 1}


@pytest.mark.parametrize(
    "call", ["cuDeviceGetDevResource", "cuDevResourceGenerateDesc", "cuGreenCtxCreate"]
)
def test_a_share_is_refused_with_its_reason_when_the_driver_makes_none(call: str) -> None:
    partitions = SmPartitions(FakeDriver(refuses=call))
    with pytest.raises(ShareRefused, match=r"share: 25 % of this GPU: the driver says 801"):
        partitions.take(0.25)


def test_a_share_is_refused_when_there_is_no_driver() -> None:
    with pytest.raises(ShareRefused, match="25 % of this GPU"):
        SmPartitions().take(0.25)


def test_a_share_is_refused_when_the_driver_is_older_than_green_contexts() -> None:
    class OldDriver(FakeDriver):
        def __getattribute__(self, name: str) -> object:
            if name.startswith("cuDevSm"):
                raise RuntimeError('Function "cuDevSmResourceSplitByCount" not found')
            return super().__getattribute__(name)

    with pytest.raises(ShareRefused, match="not found"):
        SmPartitions(OldDriver()).take(0.25)
