"""A base image with this environment's torch in it, so that no build has to fetch gigabytes.

It is the tests' base image and the packages of torch, as files of one layer that manager and
functions share. What only CUDA needs while it computes is left out: these tests emulate GPUs.
"""

import errno
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from importlib.util import cache_from_source
from pathlib import Path
from typing import cast

from packaging.requirements import Requirement

from tests.kit import needs
from tests.kit.engines.docker_base_image import BASE, base_image
from tests.kit.engines.docker_engine import Engine

TORCH = "gpufaas-test/torch:3.11"

_UNFILLED = "gpufaas-test/torch:unfilled"
_WANTED = ("msgspec", "nvidia-ml-py", "safetensors", "torch", "torchvision")
_PACKAGES = "usr/local/lib/python3.11/dist-packages"
# Compilers for GPUs, kernels of cuDNN, headers, and other packages' scripts. What is
# compiled of Python stays: else every process that imports it would compile it.
_LEFT_OUT = re.compile(
    r"^triton/|libcudnn_(adv|cnn|engines|heuristic|ops)|libcusolverMg|^\.\./"
    r"|^torch/(include|test)/|^nvidia/.*(/include/|\.a$|nvshmem_device)"
)


def torch_image(engine: Engine) -> str:
    """Its name, with the image in this Engine.

    The layer is imported without torch, whose files are then linked into it: it would take a
    minute to send three gigabytes through an archive. An image of this name has all of them.
    """
    if engine.has_image(TORCH):
        return TORCH
    if sys.version_info[:2] != (3, 11):
        needs.lacking("needs Python 3.11, as the base image has it: it is given this one's torch")
    base_image(engine)
    with tempfile.TemporaryDirectory() as context:
        Path(context, "Dockerfile").write_text(f"FROM {BASE}\nRUN mkdir -p /{_PACKAGES}/torch\n")
        engine.docker("build", "--quiet", "--tag", _UNFILLED, context)
    driver = cast("dict[str, dict[str, str]]", engine.inspect(_UNFILLED)["GraphDriver"])
    fill_with_torch([Path(driver["Data"]["UpperDir"])])
    engine.docker("tag", _UNFILLED, TORCH)
    return TORCH


def fill_with_torch(layers: Iterable[Path]) -> None:
    """Link torch's files into the one of these layers that is for them.

    A layer may have some of them already: of somebody who was cut off, or does the same meanwhile.
    """
    (layer,) = [each for each in layers if (each / _PACKAGES / "torch").is_dir()]
    for name, path in _files():
        place = layer / _PACKAGES / name
        place.parent.mkdir(parents=True, exist_ok=True)
        _link(path, place)


def _link(path: Path, place: Path) -> None:
    try:
        place.hardlink_to(path.resolve())
    except FileExistsError:
        pass  # no file is seen there before it is whole
    except OSError as error:
        if error.errno != errno.EXDEV:  # the Engine's files may lie on another file system
            raise
        _copy(path, place)


def _copy(path: Path, place: Path) -> None:
    with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        whole = Path(scratch, place.name)
        shutil.copy2(path, whole)
        whole.replace(place)


def _files() -> Iterator[tuple[str, Path]]:
    for distribution in _needed():
        for file in distribution.files or ():
            path = Path(str(distribution.locate_file(file)))
            if not _LEFT_OUT.search(str(file)) and path.is_file():
                yield str(file), path
                yield from _compiled(str(file), path)


def _compiled(file: str, path: Path) -> Iterator[tuple[str, Path]]:
    """What Python has compiled a file to. An installer that compiled none does not list it."""
    if path.suffix == ".py" and Path(cache_from_source(path)).is_file():
        yield cache_from_source(file), Path(cache_from_source(path))


def _needed() -> list[Distribution]:
    """What torch and the others require, all the way down, extras included."""
    installed = {_plain(each.metadata["Name"]): each for each in distributions()}
    found: dict[str, Distribution] = {}
    extras: dict[str, set[str]] = {}
    waiting = [Requirement(name) for name in _WANTED]
    while waiting:
        asked = waiting.pop()
        name = _plain(asked.name)
        if name in found and asked.extras <= extras[name]:
            continue
        found[name] = installed[name]
        extras[name] = extras.get(name, set()) | asked.extras
        for text in installed[name].requires or ():
            requirement = Requirement(text)
            marker = requirement.marker
            chosen = ({"extra": extra} for extra in ("", *sorted(extras[name])))
            if marker is None or any(marker.evaluate(each) for each in chosen):
                waiting.append(requirement)
    return [found[name] for name in sorted(found)]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
