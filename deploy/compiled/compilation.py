"""The build: which modules are compiled together, how, and where the result is kept."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

from common.compiled_modules import MANIFEST, ROOT, SUFFIX, digest

# What a placement runs through. Modules of named tuples and enums stay as they are: mypyc makes
# ordinary Python classes of them.
_PATTERNS = (
    "cache_manager/eviction/*.py",
    "cache_manager/model/request_rates.py",
    "cache_manager/residency/*.py",
    "scheduler/core/*.py",
    "scheduler/core/state/*.py",
    "scheduler/estimates/*.py",
    "scheduler/policies/*.py",
)
# Rooms' own files look into their folders; recordings need the codec, which builds types as it runs.
_LEFT_OUT = frozenset({"__init__.py", "recording.py"})
_TYPES = ("cache_manager/model/*.py", "scheduler/model/*.py")
_GROUP = "gpufaas_core"
# Runs in a process of its own: mypyc and setuptools both work in the current folder.
_PROGRAM = """
import sys
from mypyc.build import mypycify
from setuptools import setup
scratch, group, *sources = sys.argv[1:]
setup(
    name=group,
    packages=[],
    py_modules=[],
    ext_modules=mypycify(sources, opt_level="3", target_dir=f"{scratch}/c", group_name=group),
    script_args=["--quiet", "build_ext", "--build-lib", f"{scratch}/lib", "--build-temp", scratch],
)
"""


class MissingCompiler(Exception):
    """Nothing here can compile C."""


class FailedBuild(Exception):
    """The compiler, or mypyc, did not accept the sources; the message is what they wrote."""


def sources() -> list[str]:
    """The modules that are compiled together, as paths below the root."""
    return _matching(_PATTERNS)


def _matching(patterns: tuple[str, ...]) -> list[str]:
    found = (path for pattern in patterns for path in ROOT.glob(pattern))
    return sorted(str(path.relative_to(ROOT)) for path in found if path.name not in _LEFT_OUT)


def _relied_on() -> list[str]:
    """What the build is right for: its sources, and the modules whose types it was built with."""
    return sorted({*sources(), *_matching(_TYPES)})


def build_into(folder: Path, cache: Path) -> str:
    """Put the build of the present sources into `folder`; says where it came from."""
    kept = cache / _recipe()
    origin = "found in the cache"
    if not (kept / MANIFEST).exists():
        _need_compiler()
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=cache, prefix="build.") as scratch:
            _keep(_compiled(Path(scratch)), kept)
        origin = "compiled"
    _replace(folder, kept)
    return f"{len(sources())} modules {origin}: {folder}"


def _recipe() -> str:
    """A name for everything that the result depends on."""
    text = hashlib.sha256(f"{sys.version}{SUFFIX}{metadata.version('mypy')}{_PROGRAM}".encode())
    for source in _relied_on():
        text.update(f"{source}\0".encode() + (ROOT / source).read_bytes())
    return text.hexdigest()[:24]


def _need_compiler() -> None:
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        raise MissingCompiler(f"there is no C compiler ({compiler})")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise MissingCompiler(f"Python's headers are not installed ({header})")


def _compiled(scratch: Path) -> Path:
    """A folder with the extensions, flat, and the manifest."""
    words = [sys.executable, "-c", _PROGRAM, str(scratch), _GROUP, *sources()]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailedBuild(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    library, complete = scratch / "lib", scratch / "complete"
    complete.mkdir()
    modules = []
    for extension in sorted(library.rglob(f"*{SUFFIX}")):
        name = ".".join(extension.relative_to(library).parts).removesuffix(SUFFIX)
        extension.replace(complete / f"{name}{SUFFIX}")
        modules.append(name)
    manifest = {
        "suffix": SUFFIX,
        "modules": modules,
        "sources": {source: digest(ROOT / source) for source in _relied_on()},
    }
    (complete / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return complete


def _keep(complete: Path, kept: Path) -> None:
    """Give the result its name; another build of the same recipe may have been faster."""
    try:
        complete.replace(kept)
    except OSError:
        if not (kept / MANIFEST).exists():
            raise


def _replace(folder: Path, kept: Path) -> None:
    """The manifest goes first and comes last, so that nobody finds half a build."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    for left in folder.glob(f"*{SUFFIX}"):
        left.unlink()  # a process that has it open keeps it
    for extension in kept.glob(f"*{SUFFIX}"):
        shutil.copy2(extension, folder)
    partial = folder / f"{MANIFEST}.part"
    shutil.copy2(kept / MANIFEST, partial)
    partial.replace(folder / MANIFEST)
