"""The build: how the modules are compiled together, and where the result is kept."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

from common.compiled_modules import MANIFEST, ROOT, SUFFIX, digest
from deploy.compiled.chosen_sources import relied_on, sources

_GROUP = "gpufaas_core"
# Builds that the cache keeps: those used last. Each of them takes 3 MB.
_MOST_KEPT = 12
# Runs in a process of its own: mypyc and setuptools both work in the current folder.
_PROGRAM = """
import sys
from mypyc.build import mypycify
from setuptools import setup
level, scratch, group, *sources = sys.argv[1:]
setup(
    name=group,
    packages=[],
    py_modules=[],
    ext_modules=mypycify(sources, opt_level=level, target_dir=f"{scratch}/c", group_name=group),
    script_args=["--quiet", "build_ext", "--build-lib", f"{scratch}/lib", "--build-temp", scratch],
)
"""


class MissingCompiler(Exception):
    """Nothing here can compile C."""


class FailedBuild(Exception):
    """The compiler, or mypyc, did not accept the sources; the message is what they wrote."""


def made(cache: Path) -> Path:
    """The build of the present sources: found in the cache, or made there."""
    kept = cache / _recipe()
    if not (kept / MANIFEST).exists():
        _need_compiler()
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=cache, prefix="build.") as scratch:
            _keep(_compiled(Path(scratch)), kept)
        _prune(cache)
    os.utime(kept)
    return kept


def link_build(build: Path, link: Path) -> None:
    """Let a checkout use a build of the cache; a process that uses another one goes on with it."""
    with tempfile.TemporaryDirectory(dir=link.parent, prefix=".link.") as scratch:
        fresh = Path(scratch) / link.name
        fresh.symlink_to(build)
        fresh.replace(link)


def copy_build(build: Path, folder: Path) -> None:
    """Put a build where there is no cache."""
    shutil.copytree(build, folder)


def _recipe() -> str:
    """A name for everything that the result depends on, compiler and flags among it."""
    checks = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    words = [
        sys.version,
        SUFFIX,
        _PROGRAM,
        json.dumps([checks, sources()]),
        *(metadata.version(name) for name in ("mypy", "setuptools")),
        *(os.environ.get(name, "") for name in ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS")),  # noqa: TID251 (a program)
    ]
    text = hashlib.sha256("\0".join(words).encode())
    for source in relied_on():
        text.update(f"{source}\0{digest(ROOT / source)}\0".encode())
    return text.hexdigest()[:24]


def _need_compiler() -> None:
    named = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"  # noqa: TID251 (a program)
    compiler = named.split()[0]
    if shutil.which(compiler) is None:
        raise MissingCompiler(f"there is no C compiler ({compiler})")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise MissingCompiler(f"Python's headers are not installed ({header})")


def _compiled(scratch: Path) -> Path:
    """A folder with the extensions, flat, and the manifest."""
    level = optimisation(os.environ.get("CFLAGS", ""))  # noqa: TID251 (a program)
    words = [sys.executable, "-c", _PROGRAM, level, str(scratch), _GROUP, *sources()]
    before = {source: digest(ROOT / source) for source in relied_on()}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FailedBuild(f"it does not compile.\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    library, complete = scratch / "lib", scratch / "complete"
    complete.mkdir()
    modules = []
    for extension in sorted(library.rglob(f"*{SUFFIX}")):
        name = ".".join(extension.relative_to(library).parts).removesuffix(SUFFIX)
        extension.replace(complete / f"{name}{SUFFIX}")
        modules.append(name)
    manifest = {"suffix": SUFFIX, "modules": modules, "sources": before}
    (complete / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return complete


def optimisation(flags: str) -> str:
    """How much the compiler optimises: as the last of these flags says, or as much as it can."""
    said = [flag.removeprefix("-O") for flag in flags.split() if flag.startswith("-O")]
    return said[-1] if said else "3"


def _keep(complete: Path, kept: Path) -> None:
    """Give the result its name; another build of the same recipe may have been faster."""
    try:
        complete.replace(kept)
    except OSError:
        if not (kept / MANIFEST).exists():
            raise


def _prune(cache: Path) -> None:
    """Remove the builds that were used longest ago; a checkout that named one runs Python then."""
    builds = [path for path in cache.iterdir() if (path / MANIFEST).exists()]
    builds.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for build in builds[_MOST_KEPT:]:
        shutil.rmtree(build, ignore_errors=True)
