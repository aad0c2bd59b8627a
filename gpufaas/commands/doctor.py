"""`gpufaas doctor`: programs, packages, room and ports: what is missing, and how to get it."""

import argparse
import asyncio
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from common.build_identity import commit, release
from common.compiled_modules import prefer_compiled
from common.numerals import format_size
from gpufaas.child_programs import output_of
from gpufaas.errors import CommandError
from gpufaas.extras import install_command, lacking
from gpufaas.options.configuration import AllSettings
from gpufaas.options.shared import Commands, print_answer
from gpufaas.output.cells import columns
from gpufaas.stack.held_ports import claimed_port
from gpufaas.stack.own_etcd import OLDEST_SOUND, etcd_version, find_etcd
from gpufaas.stack_folder import StackFolder, stack_folder

_OLDEST_PYTHON, _NEWEST_PYTHON = (3, 11), (3, 13)
_OLDEST_TORCH = (2, 11)
_LEAST_FREE_BYTES = 1 << 30
_SHARED = Path("/dev/shm")
_MARKS = {"ok": "ok", "lacks": "LACKS", "old": "OLD", "optional": "-"}
_NEEDED = frozenset({"lacks", "old"})
_FOR_CPUS = (
    " (without an NVIDIA driver PyTorch's wheel for CPUs will do, without 4 GB of CUDA:"
    " --extra-index-url URL, or make setup TORCH_INDEX=URL, of the index that pytorch.org names)"
)


@dataclass(frozen=True, slots=True)
class PartStatus:
    """What a machine has of one thing; `state` is ok, lacks, old, or optional (not required)."""

    name: str
    state: str
    found: str
    used_for: str
    remedy: str = ""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("doctor", help="what this machine lacks, and how to get it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    findings = [*examine(), *examine_room(options.environment)]
    print_answer(list(map(asdict, findings)), options, lambda _: report(findings))
    return int(any(finding.state in _NEEDED for finding in findings))


def report(findings: list[PartStatus]) -> str:
    rows = [(_MARKS[part.state], part.name, part.found, part.used_for) for part in findings]
    remedies = [f"{part.name}: {part.remedy}" for part in findings if part.remedy]
    return "\n".join([columns(rows), "", *(remedies or ["Nothing is missing."])])


def examine() -> Iterator[PartStatus]:
    yield PartStatus("gpufaas", "ok", f"{release()} {commit()[:12]}".rstrip(), "all of this")
    yield _python()
    yield _packages("control plane packages", "the scheduler and the gateway", "control")
    yield _core()
    yield _torch()
    yield _gpu()
    yield _etcd()
    yield _program(
        "docker", ("docker", "version", "--format", "{{.Server.Version}}"), "functions in images",
        "https://docs.docker.com/engine/install, and start the daemon",
    )  # fmt: skip
    yield _program(
        "faas-cli", ("faas-cli", "version", "--short-version"), "deploying functions",
        "curl -sSL https://cli.openfaas.com | sh",
    )  # fmt: skip


def examine_room(environment: Mapping[str, str]) -> Iterator[PartStatus]:
    """The stack of this user's folder, and what a stack needs of the machine."""
    folder = stack_folder(None, environment)
    stack, is_up = _stack(folder)
    yield stack
    if not is_up:
        yield _ports()
    yield _room("disk", folder.root, "functions, their packages, etcd")
    yield _room("shared memory", _SHARED, "functions that share memory with their children")


def _stack(folder: StackFolder) -> tuple[PartStatus, bool]:
    used_for = "status, top, pin and all others ask it"
    try:
        running = folder.holder()
    except CommandError as error:
        remedy = "name a folder of yours with GPUFAAS_STATE"
        return PartStatus("stack", "lacks", str(error), used_for, remedy), False
    up = f"nothing is up in {folder.root}"
    if running is not None:
        up = f"starting in {folder.root} (process {running.pid})"
    if running is not None and running.gateway:
        up = f"up in {folder.root}: {running.gateway}, {running.scheduler}"
    return PartStatus("stack", "ok", up, used_for), running is not None


def _ports() -> PartStatus:
    usual, taken = AllSettings(), []
    for address in (usual.gateway.listen, usual.scheduler.listen, usual.node.metrics):
        try:
            with claimed_port(address, "gpufaas up", "another one"):
                pass
        except CommandError:
            taken.append(address)
    used_for = "gateway, scheduler, metrics of `gpufaas up`"
    if not taken:
        return PartStatus("ports", "ok", "free", used_for)
    remedy = "gpufaas up --port N for the gateway; the others move by themselves"
    return PartStatus("ports", "optional", f"{', '.join(taken)} taken", used_for, remedy)


def _room(name: str, folder: Path, used_for: str) -> PartStatus:
    """The free bytes of the file system on which a folder is, or will be."""
    there, free_bytes = _free_bytes(folder)
    room = f"{format_size(free_bytes)} free in {there}"
    if free_bytes >= _LEAST_FREE_BYTES:
        return PartStatus(name, "ok", room, used_for)
    return PartStatus(name, "optional", room, used_for, f"have 1 GiB or more free in {there}")


def _free_bytes(folder: Path) -> tuple[Path, int]:
    """The folder, or the nearest one above it that is there and may be seen, and its free bytes."""
    for there in (folder, *folder.parents):
        with suppress(OSError):
            return there, shutil.disk_usage(there).free
    raise AssertionError("everybody sees the root")


def _python() -> PartStatus:
    version, used_for = platform.python_version(), "everything"
    if not _OLDEST_PYTHON <= sys.version_info[:2] <= _NEWEST_PYTHON:
        return PartStatus("python", "old", version, used_for, "install Python 3.11, 3.12 or 3.13")
    if find_spec("ensurepip") is None:
        remedy = "Debian and Ubuntu: apt-get install python3-venv"
        return PartStatus("python", "lacks", f"{version} without ensurepip", used_for, remedy)
    return PartStatus("python", "ok", version, used_for)


def _packages(name: str, used_for: str, extra: str) -> PartStatus:
    missing = lacking(extra)
    if missing:
        found = f"no {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
        return PartStatus(name, "lacks", found, used_for, install_command(extra))
    return PartStatus(name, "ok", "installed", used_for)


def _core() -> PartStatus:
    """Which of its two forms the scheduler's core has in a process that starts now."""
    used_for, build = "placements, four times as fast when compiled", prefer_compiled()
    if build.extensions:
        return PartStatus("core", "ok", "compiled", used_for)
    remedy = "in a checkout: make compiled (needs a C compiler and Python's headers)"
    return PartStatus("core", "optional", f"as Python: {build.reason}", used_for, remedy)


def _torch() -> PartStatus:
    used_for, brought = "GPU managers and functions", install_command("gpu")
    if not _has_driver():
        brought += _FOR_CPUS
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return PartStatus("torch", "lacks", "not installed", used_for, brought)
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    state = "ok" if numbers >= _OLDEST_TORCH else "old"
    return PartStatus("torch", state, version, used_for, "" if state == "ok" else brought)


def _has_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def _gpu() -> PartStatus:
    """The GPU as nvidia-smi reports it, so that this process does not open the driver."""
    name, used_for = "NVIDIA GPU", "speed; without one GPUs are emulated on the CPU"
    gpus = output_of(
        "nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"
    )
    if gpus:
        return PartStatus(name, "ok", "; ".join(gpus.splitlines()), used_for)
    if _has_driver():
        remedy = "the driver is loaded, but nvidia-smi prints nothing: match the driver's libraries"
        return PartStatus(name, "optional", "driver without NVML", used_for, remedy)
    remedy = "install the NVIDIA driver (nvidia-smi must list the GPU), or do without"
    return PartStatus(name, "optional", "none", used_for, remedy)


def _etcd() -> PartStatus:
    used_for = "state that outlives the scheduler, and standbys"
    sound = ".".join(map(str, OLDEST_SOUND))
    remedy = f"etcd {sound} or newer on the PATH: https://github.com/etcd-io/etcd/releases"
    program = find_etcd()
    if program is None:
        return PartStatus("etcd", "optional", "none", used_for, remedy)
    version = asyncio.run(etcd_version(program))
    text = ".".join(map(str, version)) or "unknown version"
    if program.of_wheel:
        return PartStatus("etcd", "ok", f"{text} of the wheel, for a trial", used_for, remedy)
    state, remedy = ("old", remedy) if version < OLDEST_SOUND else ("ok", "")
    return PartStatus("etcd", state, f"{text} ({program.path})", used_for, remedy)


def _program(name: str, command: tuple[str, ...], used_for: str, remedy: str) -> PartStatus:
    if shutil.which(name) is None:
        return PartStatus(name, "optional", "none", used_for, remedy)
    output = output_of(*command)
    if not output:
        return PartStatus(name, "optional", "it does not answer", used_for, remedy)
    return PartStatus(name, "ok", output.splitlines()[0], used_for)
