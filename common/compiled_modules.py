"""Prefers the compiled build of the pure modules, where one was made of exactly these sources.

`python -m deploy.compiled` makes the build: extensions, and a manifest of the sources that it was
made of. One edited source leaves all of it unused, since compiled modules rely on one another's
layout. Packages with such modules call `prefer_compiled` in their `__init__`, before any of the
modules is imported.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import source_hash, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FOLDER = Path(__file__).parent / "compiled"
MANIFEST = "manifest.json"
SUFFIX = EXTENSION_SUFFIXES[0]
# off: Python's sources; a folder: the build that lies there; nothing: the one in FOLDER.
SWITCH = "GPUFAAS_COMPILED"


class CompiledBuild(NamedTuple):
    """The extensions that this process uses, by module; none, for a reason."""

    extensions: Mapping[str, Path]
    reason: str


def digest(source: Path) -> str:
    """What a manifest says of a source: another text has another digest."""
    return source_hash(source.read_bytes()).hex()


def find_build(switch: str, root: Path = ROOT) -> CompiledBuild:
    """The build that may stand for the sources below `root`."""
    if switch.lower() == "off":
        return CompiledBuild({}, f"{SWITCH}=off")
    # A link is followed once: what is imported later comes from the same build.
    folder = (Path(switch) if switch else FOLDER).resolve()
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return CompiledBuild({}, "not built")
    if manifest["suffix"] != SUFFIX:
        return CompiledBuild({}, f"built for another Python (*{manifest['suffix']})")
    for source, expected in manifest["sources"].items():
        path = root / source
        if not path.exists() or digest(path) != expected:
            return CompiledBuild({}, f"{source} has changed since it was built")
    extensions = {name: folder / f"{name}{SUFFIX}" for name in manifest["modules"]}
    return CompiledBuild(extensions, "")


class CompiledFinder:
    """Finds the modules of a build before Python looks for their sources; in `sys.meta_path`."""

    def __init__(self, build: CompiledBuild) -> None:
        self.build = build

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The extension of a compiled module; None for all others."""
        del path, target
        extension = self.build.extensions.get(fullname)
        if extension is None:
            return None
        loader = ExtensionFileLoader(fullname, str(extension))
        return spec_from_file_location(fullname, extension, loader=loader)


def prefer_compiled() -> CompiledBuild:
    """Use the compiled build from now on, where there is one; the first call decides."""
    for finder in sys.meta_path:
        if isinstance(finder, CompiledFinder):
            return finder.build
    build = find_build(os.environ.get(SWITCH, ""))
    sys.meta_path.insert(0, CompiledFinder(build))
    return build
