"""A base image with this environment's torch in it, so that no build has to fetch gigabytes.

It is the tests' base image and the packages of torch, as files of one layer that manager and
functions share. What only CUDA needs while it computes is left out: these tests emulate GPUs.
"""

import re
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from subprocess import PIPE, Popen

from packaging.requirements import Requirement

from tests.kit import needs
from tests.kit.engines.docker_base_image import base_file
from tests.kit.engines.docker_engine import Engine, EngineFailed

TORCH = "gpufaas-test/torch:3.11"

_WANTED = ("msgpack", "nvidia-ml-py", "safetensors", "torch", "torchvision", "websockets")
_PACKAGES = "usr/local/lib/python3.11/dist-packages"
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Compilers for GPUs, kernels of cuDNN, headers, and other packages' scripts.
_LEFT_OUT = re.compile(
    r"^triton/|libcudnn_(adv|cnn|engines|heuristic|ops)|libcusolverMg|__pycache__|^\.\./"
    r"|^torch/(include|test)/|^nvidia/.*(/include/|\.a$|nvshmem_device)"
)


def torch_image(engine: Engine) -> str:
    """Its name, with the image in this Engine; three gigabytes, which takes half a minute."""
    if sys.version_info[:2] != (3, 11):
        needs.lacking("needs Python 3.11, as the base image has it: it is given this one's torch")
    command = [*engine.command("docker", "--host", engine.url), "import", "--change"]
    with Popen(
        [*command, f"ENV {_PATH}", "-", TORCH], stdin=PIPE, stdout=PIPE, stderr=PIPE
    ) as made:
        assert made.stdin is not None
        _write(made.stdin)
        said = made.communicate()
    if made.returncode:
        raise EngineFailed(f"docker import: {said[1].decode()}")
    return TORCH


def _write(stream: object) -> None:
    with tarfile.open(fileobj=stream, mode="w|", bufsize=1 << 20) as image:  # type: ignore[call-overload]
        with tarfile.open(base_file()) as base:
            for member in base:
                image.addfile(member, base.extractfile(member) if member.isreg() else None)
        for name, path in _files():
            image.add(path, f"{_PACKAGES}/{name}", recursive=False)


def _files() -> Iterator[tuple[str, Path]]:
    for distribution in _needed():
        for file in distribution.files or ():
            path = Path(str(distribution.locate_file(file)))
            if not _LEFT_OUT.search(str(file)) and path.is_file():
                yield str(file), path


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
