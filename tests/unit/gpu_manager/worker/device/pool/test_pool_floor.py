"""The part of a pool that stays mapped: upwards at once, downwards after two windows."""

from gpu_manager.emulated.memory_pool import PoolFloor


def test_floor_is_the_most_of_this_window_and_the_one_before() -> None:
    floor = PoolFloor(1.0)
    assert floor.used(100, 0.0) == 100
    assert floor.used(40, 0.9) == 100
    assert floor.used(30, 1.5) == 100
    assert floor.used(20, 2.6) == 30


def test_floor_is_nothing_when_nothing_was_used_for_two_windows() -> None:
    floor = PoolFloor(1.0)
    floor.used(100, 0.0)
    assert floor.used(0, 0.5) == 100
    assert floor.used(0, 1.2) == 100
    assert floor.used(0, 2.3) == 0
    assert floor.used(5, 9.0) == 5
