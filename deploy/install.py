"""Installs extras of this checkout into the environment that runs it: `install.py EXTRA [...]`.

Packages are those of constraints.txt. They come by uv, which takes a third of pip's time; by pip
where pip cannot bring uv, or where uv fails. Needs the standard library alone.
"""

import argparse
import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
_PINNED = ("--constraint", "constraints.txt")
_BACKEND = "hatchling"  # goes in first: nothing unpinned is fetched on the side

# How much each extra brings over the network, and takes on disk (2026-12-01, CPython 3.11, x86-64).
_WORDS = {
    "gpu": "torch with CUDA: 3.0 GB to download, 5.4 GB on disk",
    "control": "etcd, FastAPI and what else the control plane needs: 70 MB, 140 MB on disk",
    "report": "matplotlib, for pictures: 50 MB",
    "dev": "what checks and measures the code: 150 MB",
    "compat": "other libraries, whose models are run: 90 MB",
}
_NO_DRIVER = """\
This machine has no NVIDIA driver: its GPUs are emulated, and PyTorch's wheel for CPUs will do,
without CUDA. `make setup TORCH_INDEX=URL` takes it from the index that pytorch.org names for CPUs.\
"""
_TRUE = ("1", "on", "t", "true", "y", "yes")  # as pip reads it
_DRIVER = Path("/proc/driver/nvidia/version")

# uv compiles nothing, and functions may not write beside torch: without this, each would compile it
# whenever it starts. What these import is compiled once.
_FIRST_PROGRAMS = {
    "gpu": (
        ("-c", "import torch, torchvision.models, torchvision.transforms.functional"),
        ("-c", "import sympy"),  # which torch takes in the end
    ),
    "control": (
        ("-m", "gpufaas", "gateway", "--help"),
        ("-m", "gpufaas", "scheduler", "--help"),
    ),
}


def install(extras: Sequence[str], torch_index: str) -> None:
    """Install the extras, with a word before it begins and one when it is done; or exit."""
    began_s = time.monotonic()
    by_uv = _brings_uv()
    print(f"Installing into {sys.prefix}, by {'uv' if by_uv else 'pip'}:")
    for extra in extras:
        if extra in _WORDS and not (extra == "gpu" and torch_index):
            print(f"  {_WORDS[extra]}")
    if torch_index:
        print(f"  torch as {torch_index} has it")
    elif "gpu" in extras and not _DRIVER.exists():
        print(_NO_DRIVER)
    sys.stdout.flush()
    project = ("--no-build-isolation", "--editable", f".[{','.join(extras)}]")
    settings = pip_settings(_output([*_PIP, "config", "list"]))
    certificates = {"SSL_CERT_FILE": settings["cert"]} if "cert" in settings else {}
    for what in ((_BACKEND,), project):
        if by_uv and _run([*_uv(settings, torch_index), *what], **certificates):
            continue
        if by_uv:
            print("uv could not; now pip tries.", flush=True)
        by_uv = False
        if not _run([*_pip(torch_index), *what]):
            sys.exit(1)
    _compile(extras)
    print(f"Installed in {time.monotonic() - began_s:.0f} s.")


def _brings_uv() -> bool:
    return _run([*_PIP, "install", "--quiet", *_PINNED, "uv"])


def _run(command: Sequence[str], **more: str) -> bool:
    environment = {**more, **os.environ}  # noqa: TID251 - a program
    return subprocess.run(command, check=False, env=environment).returncode == 0


def _pip(torch_index: str) -> Iterator[str]:
    yield from (*_PIP, "install", "--quiet", *_PINNED)
    if torch_index:
        yield from ("--extra-index-url", torch_index)


def _uv(settings: Mapping[str, str], torch_index: str) -> Iterator[str]:
    """uv's command, with pip's settings, which uv does not read."""
    yield from (sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, *_PINNED)
    if not sys.stderr.isatty():
        yield "--quiet"
    yield from uv_options(settings)
    if torch_index:
        yield from ("--extra-index-url", torch_index)
    yield from ("--index-strategy", "unsafe-best-match")  # as pip: the newest, wherever it is


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def pip_settings(listed: str) -> dict[str, str]:
    """What `pip config list` says; the environment over `install`'s settings over everybody's."""
    found: dict[str, tuple[int, str]] = {}
    ranks = {":env:": 2, "install": 1, "global": 0}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in ranks and ranks[section] >= found.get(option, (0, ""))[0]:
            found[option] = ranks[section], str(ast.literal_eval(value))
    return {option: value for option, (_, value) in found.items()}


def uv_options(settings: Mapping[str, str]) -> Iterator[str]:
    """Options of uv that say what these settings of pip say."""
    if "index-url" in settings:
        yield from ("--default-index", settings["index-url"])
    for option, ours in (
        ("extra-index-url", "--extra-index-url"),
        ("find-links", "--find-links"),
        ("trusted-host", "--allow-insecure-host"),
    ):
        for value in settings.get(option, "").split():
            yield from (ours, value)
    if settings.get("no-index", "").lower() in _TRUE:
        yield "--no-index"


def _compile(extras: Sequence[str]) -> None:
    """Have what starts first compiled, by processes that may write beside it."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # noqa: TID251 - a program
    processes = [
        subprocess.Popen([sys.executable, *program], env=environment, stdout=subprocess.DEVNULL)
        for extra in extras
        for program in _FIRST_PROGRAMS.get(extra, ())
    ]
    if max((process.wait() for process in processes), default=0, key=abs):
        sys.exit("what was installed cannot be imported")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="install.py", description=__doc__)
    parser.add_argument("extras", nargs="+", metavar="EXTRA")
    parser.add_argument("--torch-index", default="", metavar="URL")
    chosen = parser.parse_args()
    os.chdir(Path(__file__).resolve().parents[1])
    install(chosen.extras, chosen.torch_index)
