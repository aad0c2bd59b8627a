"""The thesis's models and how functions are spread over them."""

from pathlib import Path

import pytest

from cache_manager.model.ids import MIB
from scheduler.model.errors import BadWorkload
from scheduler.sim.model_catalogue import (
    MOST_USED,
    THESIS,
    on_profile,
    profiles,
    table1,
    working_set,
)


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


def test_models_have_the_sizes_and_times_of_a_profile_and_copies_too(tmp_path: Path) -> None:
    rows = ["size_class,model,torchvision_name,gpu_memory_mb,load_s,inference_s"]
    rows += [f"small,{name},x,{500 + number},0.1,0.02" for number, name in enumerate(table1())]
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(rows))

    found = on_profile(working_set(35), str(path))

    assert [model.id for model in found] == [model.id for model in working_set(35)]
    assert {(model.load_s, model.run_s) for model in found} == {(0.1, 0.02)}
    assert found[0].memory_bytes == table1(str(path))[found[0].id].memory_bytes
    assert on_profile(working_set(3), THESIS) == tuple(working_set(3))


def test_profiles_are_the_tables_that_are_carried() -> None:
    assert THESIS in profiles()
    assert all(len(table1(name)) == 22 for name in profiles())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("", "lacks"),
        ("model,load_s\nvgg19,1\n", "no table of models"),
        ("model,size_class,gpu_memory_mb,load_s,inference_s\nvgg19,a,x,1,1\n", "no table"),
        ("model,size_class,gpu_memory_mb,load_s,inference_s\nvgg19,a,5,nan,1\n", "no table"),
        ("model,size_class,gpu_memory_mb,load_s,inference_s\nvgg19,a,0,1,1\n", "no table"),
        ("model,size_class,gpu_memory_mb,load_s,inference_s\nvgg19,a,5,1,-1\n", "no table"),
        ("model,size_class,gpu_memory_mb,load_s,inference_s\nvgg19,a,5,1,1\n", "lacks alexnet"),
    ],
)
def test_profile_is_refused_when_it_is_no_table_of_the_models(
    content: str | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadWorkload, match=words):
        on_profile(working_set(5), str(path))


def test_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadWorkload, match=r"no profile h900; there are .*thesis"):
        on_profile(working_set(5), "h900")
