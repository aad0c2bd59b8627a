"""The real faas-cli: the one on the PATH, else one that go builds, once, at a pinned version."""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_MODULE = Path(__file__).with_name("e2e") / "faas_cli"
_PACKAGE = "github.com/openfaas/faas-cli"
_BUILD_S = 100.0


class NoFaasCli(Exception):
    """There is none, and none can be made here."""


def faas_cli() -> Path:
    """Its path; NoFaasCli says in one line why there is none."""
    found = shutil.which("faas-cli")
    if found:
        return Path(found)
    kept = Path(sys.prefix) / f"faas-cli-{_version()}"
    if not kept.exists():
        _build(kept)
    return kept


def _version() -> str:
    """What go.mod pins; `go install` would ask for a list of versions, which mirrors may refuse."""
    wanted = re.search(rf"{re.escape(_PACKAGE)} (\S+)", (_MODULE / "go.mod").read_text())
    assert wanted, f"{_MODULE}/go.mod names {_PACKAGE}"
    return wanted[1]


def _build(kept: Path) -> None:
    go = shutil.which("go")
    if go is None:
        raise NoFaasCli("needs faas-cli on the PATH, or go to build it")
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        made = Path(folder) / "faas-cli"
        try:
            done = subprocess.run(
                [go, "build", "-mod=readonly", "-o", str(made), _PACKAGE],
                cwd=_MODULE,
                capture_output=True,
                text=True,
                timeout=_BUILD_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise NoFaasCli(f"go has not built faas-cli after {_BUILD_S:g} s") from error
        if done.returncode:
            raise NoFaasCli(f"go cannot build faas-cli: {done.stderr.strip().splitlines()[-1:]}")
        made.replace(kept)
