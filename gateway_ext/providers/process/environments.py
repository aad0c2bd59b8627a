"""Python environments of functions: one for each content of requirements.txt, cached.

An environment sees its own packages first, then those of the gateway (torch among them), through a
.pth file with plain paths: what is there need not be installed again, a pin that differs is, and
where nothing is missing pip is not asked. Our own packages do not come along from a source tree.
pip runs as a user without rights.
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
from gateway_ext.providers.process.builds import requirements_of
from gateway_ext.providers.process.launching import MARK, Orders, interpreter_folders, launch
from gateway_ext.providers.process.settings import ProcessSettings

_MADE = ".made"  # a file in an environment that is whole
_BARE_NAME = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]*")
Say = Callable[[str], None]


class EnvironmentFailed(ProviderFailed):
    """pip or venv did not succeed; the last line of what it said."""


class Environments:
    """The folder with all of them."""

    def __init__(self, settings: ProcessSettings, uid: int | None, mark: str) -> None:
        self._mark = mark
        self._settings = settings
        self._folder = settings.state / "envs"
        self._uid = uid
        self._asked: set[str] = set()  # since it was last looked what is used
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def name_of(self, requirements: bytes) -> str:
        """What the environment for these requirements is called."""
        meant = self._missing(requirements)
        base = os.path.realpath(self._settings.base_python)
        identity = f"{sys.version} {base} {self._gateway_packages()}\n".encode()
        return hashlib.sha256(identity + meant).hexdigest()[:16]

    async def ready(self, requirements: bytes, say: Say) -> Path:
        """Its Python, made first where there is none; progress goes to `say`."""
        name = self.name_of(requirements)
        self._asked.add(name)
        folder = self._folder / name
        async with self._locks[name]:
            if not (folder / _MADE).exists():
                await self._make(folder, requirements, say)
        return folder / "bin" / "python"

    async def prune(self, builds: Collection[Path]) -> None:
        """Removes those that none of these builds needs."""
        self._asked.clear()
        used = {self.name_of(await asyncio.to_thread(requirements_of, build)) for build in builds}
        for folder in list(self._folder.iterdir()):
            if folder.name in used | self._asked:
                continue
            async with self._locks[folder.name]:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _make(self, folder: Path, requirements: bytes, say: Say) -> None:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if self._uid is not None:
            os.chown(folder, self._uid, self._uid)
        try:
            await self._fill(folder, requirements, say)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise

    async def _fill(self, folder: Path, requirements: bytes, say: Say) -> None:
        base = str(self._settings.base_python)
        shared = self._gateway_packages()
        bare = ["--without-pip"] if shared else []  # the gateway's is found beside its packages
        await self._run(folder, [base, "-I", "-m", "venv", *bare, str(folder)], say)
        packages = next(folder.glob("lib/python*/site-packages"))
        _write_new(packages / "_gateway.pth", "\n".join(shared).encode() + b"\n")
        if self._missing(requirements):
            wanted = folder / "requirements.txt"
            _write_new(wanted, requirements)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-input"]
            options = ["--disable-pip-version-check", "--no-cache-dir", "--progress-bar", "off"]
            say("installing what requirements.txt asks for")
            await self._run(folder, [*pip, *options, "-r", str(wanted)], say)
        await asyncio.to_thread(_close, folder)
        (folder / _MADE).touch()

    def _missing(self, requirements: bytes) -> bytes:
        """What is left to pip: a name with no version is met where the gateway has that package."""
        lines = [line.split(b" #")[0].strip() for line in requirements.splitlines()]
        asked = [line for line in lines if line and not line.startswith(b"#")]
        return b"\n".join(line for line in asked if not self._is_met(line))

    def _is_met(self, line: bytes) -> bool:
        if not _BARE_NAME.fullmatch(line):
            return False
        found = distributions(name=line.decode(), path=self._gateway_packages())
        return next(iter(found), None) is not None

    def _gateway_packages(self) -> list[str]:
        """Nothing for another Python than the gateway's: what was compiled for this one fails."""
        if os.path.realpath(self._settings.base_python) != os.path.realpath(sys.executable):
            return []
        paths = sysconfig.get_paths()
        return list(dict.fromkeys([paths["purelib"], paths["platlib"]]))

    async def _run(self, folder: Path, command: list[str], say: Say) -> None:
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
        orders = Orders(command, environment, str(folder), self._uid, visible=visible)
        started = launch(orders)
        try:
            last = await _told(started.output, say)
            status = await asyncio.to_thread(started.process.wait)
        except asyncio.CancelledError:
            os.killpg(started.process.pid, 9)
            started.process.wait()
            raise
        finally:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
        if status:
            raise EnvironmentFailed(f"its environment cannot be made ({status}): {last}")


async def _told(output: int, say: Say) -> str:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output, "rb", buffering=0)
    )
    last = ""
    try:
        while line := await reader.readline():
            text = line.decode(errors="replace").rstrip()
            if text:
                say(text)
                last = text
    finally:
        transport.close()
    return last


def _write_new(path: Path, content: bytes) -> None:
    """The folder is the builder's: what it may have put there before is not followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o644), "wb") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(content)


def _close(folder: Path) -> None:
    """From here on root's, where the gateway is root, and readable for all functions."""
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", "0:0", str(folder)], check=True)
    subprocess.run(["chmod", "-R", "u+rwX,go+rX,go-w", str(folder)], check=True)
