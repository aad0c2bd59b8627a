"""The thesis's models and how functions are spread over them."""

import pytest

from cache_manager.model.ids import MIB
from scheduler.sim.model_catalogue import MOST_USED, table1, working_set


def test_table1_has_the_thesis_models_and_sizes() -> None:
    table = table1()

    assert len(table) == 22
    assert table["vgg19"].memory_bytes == 3947 * MIB
    assert (table["vgg19"].load_s, table["vgg19"].run_s) == (4.07, 1.33)


def test_working_set_begins_with_the_most_used_models() -> None:
    assert tuple(model.id for model in working_set(15)[:5]) == MOST_USED


@pytest.mark.parametrize("size", [6, 15, 22, 25, 35, 100])
def test_working_set_spreads_sizes_evenly(size: int) -> None:
    classes = [model.size_class for model in working_set(size)]
    counts = [classes.count(name) for name in ("small", "medium", "large")]

    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("size", [15, 35, 200])
def test_working_set_gives_each_function_a_model_of_its_own(size: int) -> None:
    models = working_set(size)

    assert len({model.id for model in models}) == size


def test_working_set_repeats_models_as_copies_when_a_class_is_used_up() -> None:
    models = {model.id: model for model in working_set(35)}
    copies = [model for name, model in models.items() if "#" in name]

    assert copies
    for copy in copies:
        original = table1()[copy.id.split("#")[0]]
        assert (copy.memory_bytes, copy.load_s) == (original.memory_bytes, original.load_s)


def test_smaller_working_set_is_the_beginning_of_a_larger_one() -> None:
    assert working_set(35)[:15] == working_set(15)
