"""The image that has torch is whole whoever makes it, and however often it is asked for."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kit.engines.docker_engine import Engine
from tests.kit.engines.images.torch_image import fill_with_torch, torch_image

pytestmark = pytest.mark.timeout(900)  # it may be the first one that asks for the image


def test_layer_is_filled_when_two_do_so_at_once_and_one_was_cut_off(tmp_path: Path) -> None:
    layers = [tmp_path / "cut-off", tmp_path / "whole"]
    for layer in layers:
        (layer / "usr/local/lib/python3.11/dist-packages/torch").mkdir(parents=True)
    fill_with_torch(layers[1:])
    expected = _files(layers[1])
    for name in sorted(expected)[::2]:
        place = layers[0] / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.hardlink_to(layers[1] / name)

    with ThreadPoolExecutor(2) as pool:
        for filled in [pool.submit(fill_with_torch, layers[:1]) for _ in range(2)]:
            filled.result()

    assert _files(layers[0]) == expected


def _files(folder: Path) -> dict[str, int]:
    """Names and sizes."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.stat().st_size for path in found}


def test_image_is_the_same_when_it_is_asked_for_again(docker_engine: Engine) -> None:
    made = docker_engine.inspect(torch_image(docker_engine))["Id"]
    assert docker_engine.inspect(torch_image(docker_engine))["Id"] == made
    run = ("run", "--rm", "--network", "none", torch_image(docker_engine))
    asked = "import torch; print(torch.ones(2).sum().item())"
    assert docker_engine.docker(*run, "python", "-c", asked) == "2.0"
