"""Packages in a folder, from which a provider's pip installs without any index."""

import io
import tarfile
import textwrap
import zipfile
from dataclasses import replace
from pathlib import Path

from tests.kit.processes.process_functions import World

_INFO = "{name}-1.0.dist-info"
# A build backend of its own: what it does, pip runs while it installs the package.
_BACKEND = """
import os, sys, zipfile
def get_requires_for_build_wheel(settings=None):
    return []
def build_wheel(folder, settings=None, metadata=None):
    act()
    files = {files!r}
    with zipfile.ZipFile(os.path.join(folder, {wheel!r}), "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return {wheel!r}
"""
_PROJECT = '[build-system]\nrequires = []\nbuild-backend = "setup"\nbackend-path = ["."]\n'


def _contents(name: str) -> dict[str, str]:
    module, info = f"{name}.py", _INFO.format(name=name)
    shown = name.replace("_", "-")
    return {
        module: "SAYS = 'tiny'\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {shown}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "".join(
            f"{path},,\n"
            for path in (module, f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD")
        ),
    }


def add_wheel(folder: Path, name: str = "tiny_thing") -> None:
    """Add the smallest package that pip takes."""
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in _contents(name).items():
            archive.writestr(path, text)


def add_source(folder: Path, name: str, act: str) -> None:
    """Add a package whose setup.py calls `act`, a function in this text, while it is installed."""
    wheel = f"{name}-1.0-py3-none-any.whl"
    setup = textwrap.dedent(act) + _BACKEND.format(files=_contents(name), wheel=wheel)
    files = {
        "pyproject.toml": _PROJECT,
        "setup.py": setup,
        "PKG-INFO": _contents(name)[f"{_INFO.format(name=name)}/METADATA"],
    }
    with tarfile.open(folder / f"{name}-1.0.tar.gz", "w:gz") as archive:
        for path, text in files.items():
            entry = tarfile.TarInfo(f"{name}-1.0/{path}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))


async def offline(there: World, **settings: float) -> Path:
    """Give a world a provider whose pip finds packages in this folder alone; one is there."""
    links = there.folder / "links"
    links.mkdir()
    links.chmod(0o755)
    add_wheel(links)
    await there.provider.close()
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links)}
    there.bounds = replace(there.bounds, pip_environment=pip)
    there.settings = replace(there.settings, visible=(str(links),), **settings)  # type: ignore[arg-type]  # numbers all
    there.provider = there.new_provider()
    await there.provider.start(there.heard)
    return links
