"""The real faas-cli: a current one that is at hand, else one of 2021 that go builds once."""

import shutil
import subprocess
from pathlib import Path

from tests.kit.cache import made_once
from tests.kit.places import ROOT

_AT_HAND = ROOT.parent / "shared" / "tools" / "faas-cli"
_MODULE = ROOT / "tests" / "e2e" / "faas_cli"
_PACKAGE = "github.com/openfaas/faas-cli"
_BUILD_S = 300.0


class NoFaasCli(Exception):
    """There is none, and none can be made here."""


def faas_cli() -> Path:
    """Its path; NoFaasCli says in one line why there is none."""
    if _AT_HAND.exists():
        return _AT_HAND
    if found := shutil.which("faas-cli"):
        return Path(found)
    # go.mod and go.sum pin it; `go install` would ask for a list of versions, which mirrors refuse.
    recipe = b"".join((_MODULE / name).read_bytes() for name in ("go.mod", "go.sum"))
    return made_once("faas-cli", recipe, _build)


def _build(made: Path) -> None:
    go = shutil.which("go")
    if go is None:
        raise NoFaasCli("needs faas-cli on the PATH, or go to build it")
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
