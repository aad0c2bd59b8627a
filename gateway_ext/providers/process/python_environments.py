"""Python environments of functions: one for each content of requirements.txt, cached.

An environment sees its own packages first, then those of the gateway (torch among them), through a
.pth file with plain paths. A package that the gateway has is not installed again unless another
version is pinned, and pip is not started if no package is missing. A gateway that runs from a
source tree does not offer its own packages. pip runs as a user without rights.
"""

import asyncio
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Collection
from importlib.metadata import distributions
from pathlib import Path

from gateway_ext.errors import ProviderFailed
from gateway_ext.providers.process.build_folders import requirements_of
from gateway_ext.providers.process.process_launch import (
    MARK,
    LaunchOrders,
    interpreter_folders,
    launch,
)
from gateway_ext.providers.process.process_settings import ProcessProviderSettings

_MADE = ".made"  # a file in an environment that is complete
_BARE_NAME = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]*")
Note = Callable[[str], None]


class EnvironmentFailed(ProviderFailed):
    """pip or venv failed; the text has the last line of its output."""


class PythonEnvironments:
    """The environments of a provider, in one folder; pip runs as user `uid`."""

    def __init__(self, settings: ProcessProviderSettings, uid: int | None, mark: str) -> None:
        self._mark = mark
        self._settings = settings
        self._folder = settings.state / "envs"
        self._uid = uid
        self._requested: set[str] = set()  # since the last pruning began
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def name_of(self, requirements: bytes) -> str:
        """The name of the environment for these requirements."""
        meant = self._missing(requirements)
        base = os.path.realpath(self._settings.base_python)
        identity = f"{sys.version} {base} {self._gateway_packages()}\n".encode()
        return hashlib.sha256(identity + meant).hexdigest()[:16]

    async def ready(self, requirements: bytes, note: Note) -> Path:
        """The Python of an environment, which is made if there is none; progress goes to `note`."""
        name = self.name_of(requirements)
        self._requested.add(name)
        folder = self._folder / name
        async with self._locks[name]:
            if not (folder / _MADE).exists():
                await self._make(folder, requirements, note)
        return folder / "bin" / "python"

    async def prune(self, builds: Collection[Path]) -> None:
        """Delete environments that none of these builds needs."""
        self._requested.clear()
        used = {self.name_of(await asyncio.to_thread(requirements_of, build)) for build in builds}
        for folder in list(self._folder.iterdir()):
            if folder.name in used | self._requested:
                continue
            async with self._locks[folder.name]:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _make(self, folder: Path, requirements: bytes, note: Note) -> None:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if self._uid is not None:
            os.chown(folder, self._uid, self._uid)
        try:
            await self._fill(folder, requirements, note)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise

    async def _fill(self, folder: Path, requirements: bytes, note: Note) -> None:
        base = str(self._settings.base_python)
        shared = self._gateway_packages()
        bare = ["--without-pip"] if shared else []  # that of the gateway is found with its packages
        await self._run(folder, [base, "-I", "-m", "venv", *bare, str(folder)], note)
        packages = next(folder.glob("lib/python*/site-packages"))
        _write_new(packages / "_gateway.pth", "\n".join(shared).encode() + b"\n")
        if self._missing(requirements):
            wanted = folder / "requirements.txt"
            _write_new(wanted, requirements)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-input"]
            options = ["--disable-pip-version-check", "--no-cache-dir", "--progress-bar", "off"]
            note("installing what requirements.txt asks for")
            await self._run(folder, [*pip, *options, "-r", str(wanted)], note)
        await asyncio.to_thread(_seal_environment, folder)
        (folder / _MADE).touch()

    def _missing(self, requirements: bytes) -> bytes:
        """The lines that pip must install: a package of the gateway satisfies a bare name."""
        lines = [line.split(b" #")[0].strip() for line in requirements.splitlines()]
        asked = [line for line in lines if line and not line.startswith(b"#")]
        return b"\n".join(line for line in asked if not self._is_met(line))

    def _is_met(self, line: bytes) -> bool:
        if not _BARE_NAME.fullmatch(line):
            return False
        found = distributions(name=line.decode(), path=self._gateway_packages())
        return next(iter(found), None) is not None

    def _gateway_packages(self) -> list[str]:
        """Empty for another Python than the gateway's, as compiled packages would not load."""
        if os.path.realpath(self._settings.base_python) != os.path.realpath(sys.executable):
            return []
        paths = sysconfig.get_paths()
        return list(dict.fromkeys([paths["purelib"], paths["platlib"]]))

    async def _run(self, folder: Path, command: list[str], note: Note) -> None:
        scratch = folder / "tmp"
        environment = {
            **self._settings.pip_environment,
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HOME": str(scratch),
            "TMPDIR": str(scratch),
            MARK: f"{self._mark}/env-{folder.name}",
        }
        scratch.mkdir(exist_ok=True)
        if self._uid is not None:
            os.chown(scratch, self._uid, self._uid)
        visible = [*interpreter_folders(self._settings.base_python), str(folder)]
        orders = LaunchOrders(command, environment, str(folder), self._uid, visible=visible)
        started = launch(orders)
        try:
            last = await _forward_output(started.output, note)
            status = await asyncio.to_thread(started.process.wait)
        except asyncio.CancelledError:
            os.killpg(started.process.pid, 9)
            started.process.wait()
            raise
        finally:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
        if status:
            raise EnvironmentFailed(f"its environment cannot be made ({status}): {last}")


async def _forward_output(output: int, note: Note) -> str:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output, "rb", buffering=0)
    )
    last = ""
    try:
        while line := await reader.readline():
            text = line.decode(errors="replace").rstrip()
            if text:
                note(text)
                last = text
    finally:
        transport.close()
    return last


def _write_new(path: Path, content: bytes) -> None:
    """Write a file that must not exist: pip's user may have put a link there."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o644), "wb") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(content)


def _seal_environment(folder: Path) -> None:
    """Make the environment readable for all functions and, if we are root, owned by root."""
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", "0:0", str(folder)], check=True)
    subprocess.run(["chmod", "-R", "u+rwX,go+rX,go-w", str(folder)], check=True)
