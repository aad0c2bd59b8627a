"""Installs each peer into an environment of its own, from pinned versions, outside the checkout."""

import hashlib
import subprocess
import sys
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path

import torch

_PINNED = Path(__file__).parent / "pinned"
_TORCH = Path(torch.__file__).parents[1]
# The peers' own packages come first; the path's end only adds what they lack.
_BORROWED = "gpufaas_bench_torch.pth"


class PeerSystem(StrEnum):
    """A system to compare gpufaas with, or to measure it with; the value names its files here."""

    RAY = "ray"
    LITSERVE = "litserve"
    BENTOML = "bentoml"
    MOSEC = "mosec"
    TRITON = "triton"
    LOADGEN = "loadgen"


# Where the package has another name.
_PACKAGES = {PeerSystem.TRITON: "nvidia-pytriton", PeerSystem.LOADGEN: "mlcommons_loadgen"}


class PeerUnavailable(Exception):
    """A peer could not be installed or started, with the reason."""


def install(peer: PeerSystem) -> str:
    """Install the peer unless it is installed already; its version. Else PeerUnavailable."""
    folder = peer_folder(peer)
    made = folder / "made"
    if not made.exists():
        print(f"installing {peer} into {folder} ...", flush=True)
        _ran(peer, [sys.executable, "-m", "venv", "--clear", str(folder)])
        # Every package is pinned, so pip has nothing to resolve.
        pip = [str(peer_python(peer)), "-m", "pip", "--disable-pip-version-check", "install"]
        _ran(peer, [*pip, "--quiet", "--no-deps", "--requirement", str(_pinned(peer))])
        _borrow_torch(folder)
        made.touch()
    package = _PACKAGES.get(peer, peer.value)
    asked = f"import torch; from importlib.metadata import version; print(version({package!r}))"
    return _ran(peer, [str(peer_python(peer)), "-c", asked]).strip()


def peer_python(peer: PeerSystem) -> Path:
    """The Python of the peer's environment."""
    return peer_folder(peer) / "bin" / "python"


def peer_folder(peer: PeerSystem) -> Path:
    """The peer's environment: another list of versions, Python or torch gets another folder."""
    recipe = f"{sys.version}\n{_TORCH}\n{version('torch')}\n".encode() + _pinned(peer).read_bytes()
    return peers_folder() / f"{peer}-{hashlib.sha256(recipe).hexdigest()[:16]}"


def peers_folder() -> Path:
    """`~/.cache/gpufaas/peers`, which is made where it is not there."""
    folder = Path.home() / ".cache" / "gpufaas" / "peers"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _borrow_torch(folder: Path) -> None:
    """Let the environment import this environment's torch: the same version, and no second copy."""
    (site,) = folder.glob("lib/python*/site-packages")
    (site / _BORROWED).write_text(f"{_TORCH}\n", encoding="utf-8")


def _pinned(peer: PeerSystem) -> Path:
    return _PINNED / f"{peer}.txt"


def _ran(peer: PeerSystem, command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise PeerUnavailable(f"{peer} cannot be installed here: {' '.join(last)}")
    return done.stdout
