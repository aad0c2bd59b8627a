"""`make gpu-rehearsal`: a GPU machine's fifteen minutes, in a machine like it but for the GPU.

It has a Python of its own at /mnt/torch with torch 2.11, no network, the checkout without .git, and
the kit; it lacks what the kit carries. There it runs `short.sh A`, `short.sh B`, the rest of `make
gpu`, the unit tests of the worker and the shim, and a tenth of the compatibility programs, all on
emulated GPUs but with real workers, sandboxes and users. It needs root, for namespaces.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.__main__ import PARTS, WITHIN_S

ROOT = Path(__file__).parents[2]
# What the machine has that is ours to know: these versions are its own.
MACHINE = (
    "torch==2.11.0",
    "torchvision==0.26.0",
    "transformers==5.17.0",
    "accelerate==1.15.0",
    "huggingface-hub==1.33.0",
    "safetensors==0.8.0",
    "tokenizers==0.23.2",
    "cuda-bindings==13.0.3",
    "aiohttp",
    "annotated-doc",
    "anyio",
    "click",
    "grpcio",
    "h11",
    "httpx",
    "hypothesis",
    "idna",
    "jaxtyping",
    "matplotlib",
    "msgpack",
    "nvidia-ml-py",
    "prometheus-client",
    "protobuf",
    "psutil",
    "pytest",
    "pytest-benchmark",
    "pytest-cov",
    "pytest-mock",
    "pytest-timeout",
    "pytest-xdist",
    "pyyaml",
    "scipy",
    "sentencepiece",
    "setuptools",
    "timm",
    "uvloop",
)
# Where the machine's Python lies: every system has the folder, and no worker sees it by itself.
PLACE = Path("/mnt/torch")
_PYTHON = PLACE / ".venv" / "bin" / "python3"
# Every tenth program of the groups whose libraries the machine has.
_PROGRAMS = """
from compat.catalogue import ENTRIES
names = [entry.name for entry in ENTRIES if entry.group in {"torch", "vision", "language"}]
print(*names[::10], sep="\\n")
"""
_MOST_FILES, _MOST_BYTES = 8, 16 << 20
_STOPPED = 124  # as timeout(1) has it
_TESTS = (
    "tests/processes/workers",
    "tests/unit/gpu_manager/worker",
    "tests/unit/torch_shim",
    "tests/processes/templates",
    "tests/unit/gateway_ext/runtime/template",
)


@dataclass(slots=True)
class Step:
    """One command there: the seconds that it may take, and what came of it."""

    name: str
    command: Sequence[str]
    limit_s: float
    took_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        """A line of the table."""
        words = "; ".join(self.wrong) or "good"
        return f"| {self.name} | {self.took_s:.0f} s of {self.limit_s:.0f} | {words} |"


class Machine:
    """The folder that is the machine's /mnt/torch, and commands that run there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, python: str) -> None:
        """Install what it has, unless that has been done before."""
        stamp = self.folder / "made-of"
        made_of = "\n".join((python, *MACHINE))
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == made_of:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        print(f"torch and what is usual beside it go to {self.folder}: 5 GB", flush=True)
        install = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        for command in (
            [python, "-m", "venv", str(_PYTHON.parents[1])],
            [str(_PYTHON), *install, *MACHINE],
        ):
            if self.run(command, ROOT, dict(os.environ), None, network=True):  # noqa: TID251
                raise SystemExit(f"{' '.join(command[:4])} has failed")
        stamp.write_text(made_of, encoding="utf-8")

    def run(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        limit_s: float | None,
        *,
        network: bool = False,
        output: Path | None = None,
    ) -> int:
        """The command's exit status, _STOPPED where it has not ended in time.

        It runs in a mount, process and network name space of its own: what it leaves ends with it.
        """
        spaces = ["unshare", "--mount", "--propagation", "private"]
        if not network:
            spaces += ["--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        script = (
            f'mount -t tmpfs none {PLACE.parent} && mkdir {PLACE} && mount --bind "$0" {PLACE}'
            f' && {"true" if network else _LOOPBACK} && "$@"; exit $?'
        )
        started = [*spaces, "bash", "-c", script, str(self.folder), *command]
        with output.open("ab") if output else nullcontext() as words:
            process = subprocess.Popen(
                started,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
            )
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return _STOPPED
            finally:
                process.kill()
                process.wait()


# The one interface of a new network name space is down at first.
_LOOPBACK = (
    f"{sys.executable} -c 'import fcntl, socket, struct;"
    ' fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh22x", b"lo", 1))\''
)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Make the machine and run everything there; 0 when all of it is good."""
    parser = argparse.ArgumentParser(prog="bench.gpu.rehearsal", description=__doc__)
    parser.add_argument("--python", default="", help="of the machine (3.12, else 3.11)")
    names = [step.name for step in _steps()]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="STEP", help=", ".join(names)
    )
    options = parser.parse_args(arguments)
    if os.geteuid():
        print("bench.gpu.rehearsal: needs root, for namespaces", file=sys.stderr)
        return 1
    began_s = time.monotonic()
    python = options.python or _found_python()
    version = _said([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpufaas"
    machine, kit = Machine(cache / f"gpu-machine-{version}"), cache / f"gpu-kit-{version}"
    machine.make(python)
    build = [sys.executable, "-m", "bench.gpu.kit", "build", "--kit", str(kit)]
    subprocess.run([*build, "--python-version", version], cwd=ROOT, check=True)
    made_s = time.monotonic() - began_s
    logs = ROOT / "out" / "gpu-rehearsal"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="gpu-rehearsal") as name:
        Path(name).chmod(0o755)  # functions are other users
        steps = list(_run(machine, kit, Path(name), logs, options.only))
    print(f"\nThe machine was made in {made_s:.0f} s, the rest took", end=" ")
    print(f"{time.monotonic() - began_s - made_s:.0f} s. Logs and results: {logs}\n")
    print("| step | time | result |\n| --- | --- | --- |")
    print(*(step.line() for step in steps), sep="\n")
    return int(any(step.wrong for step in steps))


def _run(
    machine: Machine, kit: Path, scratch: Path, logs: Path, only: Sequence[str]
) -> Iterator[Step]:
    checkout, out = scratch / "checkout", logs / "results"
    _copy_checkout(checkout)
    shutil.copytree(kit, checkout / "out" / "gpu-kit")
    out.mkdir()
    environment = {
        "PATH": f"{_PYTHON.parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(scratch),
        "OUT": str(out),
        "LANG": "C.UTF-8",
    }
    for step in _steps():
        if step.name not in only:
            continue
        print(f"{step.name}: {' '.join(step.command)[:150]}", flush=True)
        began_s = time.monotonic()
        log = logs / f"{step.name}.txt"
        code = machine.run(step.command, checkout, environment, step.limit_s, output=log)
        step.took_s = time.monotonic() - began_s
        if code:
            ended = "stopped at its limit" if code == _STOPPED else f"ended with {code}"
            step.wrong.append(f"{ended}: {log}")
        if step.name in _PARTS_OF:
            step.wrong += _lacking(out, _PARTS_OF[step.name])
        print(step.line(), flush=True)
        yield step


# Which parts must have rows after which step; the last one has those of the others, too.
_PARTS_OF = {
    "A": ("facts", "smoke", "tests"),
    "B": ("copies", "memory", "cold", "warm"),
    "all": tuple(part.name for part in PARTS),
}


def _steps() -> Iterator[Step]:
    run = ["python3", "-m", "bench.gpu.kit", "run"]
    yield Step("A", ["bash", "bench/gpu/short.sh", "A", "--emulate"], 240)
    yield Step("B", ["bash", "bench/gpu/short.sh", "B", "--emulate"], 490)
    yield Step("all", [*run, "--emulate"], WITHIN_S)
    # A machine's own plugins may be made for another pytest.
    plugins = ["-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "-p", "xdist", "-n", "3"]
    tests = [*run, "--module", "pytest", "-q", "-p", "no:cacheprovider", *plugins]
    yield Step("tests", ["env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", *tests, *_TESTS], 1800)
    names = _said([sys.executable, "-c", _PROGRAMS]).splitlines()
    programs = [*run, "--module", "compat", *names, "--forked", "--threads", "1"]
    yield Step("programs", [*programs, "--parallel", "2", "--limit", "300"], 2400)


def _lacking(out: Path, names: Sequence[str]) -> Iterator[str]:
    """What the results lack, and files that are too many or too large to come back."""
    path = out / "gpu-emulated.json"
    found: dict[str, Any] = {}
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))["parts"]
    for name in names:
        part = found.get(name, {"state": "missing", "rows": []})
        if part["state"] != "done" or not part["rows"]:
            yield f"{name} is {part['state']} with {len(part['rows'])} rows"
    files = [each for each in out.rglob("*") if each.is_file()]
    if len(files) > _MOST_FILES:
        yield f"{len(files)} files, and {_MOST_FILES} are the most"
    yield from (f"{each} is too large" for each in files if each.stat().st_size > _MOST_BYTES)


def _copy_checkout(target: Path) -> None:
    """What travels to such a machine: files that git has or does not ignore."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in _said(listed).split("\0"):
        source = ROOT / name
        if name and source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def _found_python() -> str:
    """A Python that can make environments: 3.12 as there, where this machine has it."""
    of_pyenv = sorted(Path.home().glob(".pyenv/versions/3.12.*/bin/python3.12"))
    for python in ("python3.12", *map(str, of_pyenv), "python3.11"):
        can = [python, "-c", "import ensurepip, venv"]
        if (
            shutil.which(python)
            and not subprocess.run(can, capture_output=True, check=False).returncode
        ):
            return python
    raise SystemExit("bench.gpu.rehearsal: needs Python 3.12, else 3.11, with its venv module")


def _said(command: Sequence[str]) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ)))  # noqa: TID251 - an entry point
