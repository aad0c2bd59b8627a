"""The image that others are built on: Debian with Python, made on this machine without a registry.

What a build needs comes along: this machine's certificates, how its pip is configured to find
packages, and a C compiler with Python's headers for the core, since no build can ask apt. It is
made once (a minute) and kept beside other temporary files.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from ast import literal_eval
from collections.abc import Iterator
from pathlib import Path

from tests.kit import needs
from tests.kit.cache import made_once
from tests.kit.engines.docker_engine import Engine

BASE = "gpufaas-test/python:3.11"

_SUITE = "bookworm"
_PACKAGES = (
    "ca-certificates",
    "gcc",
    "libc6-dev",
    "python3",
    "python3-dev",
    "python3-pip",
    "python3-venv",
)
_LEFT_OUT = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
    "var/cache/apt",
)
_MANAGED = "usr/lib/python3.11/EXTERNALLY-MANAGED"  # pip may install: there is nobody else
_CERTIFICATES = Path("etc/ssl/certs/ca-certificates.crt")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Of pip's settings those that name no file of this machine.
_PIP = frozenset({"index-url", "extra-index-url", "trusted-host", "default-timeout", "proxy"})


def base_image(engine: Engine) -> str:
    """Its name, with the image in this Engine."""
    if not engine.has_image(BASE):
        # Nobody waits for what these images compute: the core is compiled in a quarter of the time.
        environment = f"ENV PATH={_PATH} CFLAGS=-O0"
        engine.docker("import", "--change", environment, base_file(), BASE)
    return BASE


def base_file() -> Path:
    """The image's files as a tar, made where there is none of this recipe."""
    recipe = [_SUITE, _PACKAGES, _LEFT_OUT, _pip_settings(), _certificates().decode(), "1"]
    return made_once("docker-base", json.dumps(recipe).encode(), _make)


def _make(file: Path) -> None:
    needs.root()
    debootstrap = needs.command("debootstrap", "debootstrap")
    with tempfile.TemporaryDirectory(dir=file.parent, prefix="root-") as scratch:
        root = Path(scratch)
        included = f"--include={','.join(_PACKAGES)}"
        _run(str(debootstrap), "--variant=minbase", included, _SUITE, str(root))
        _complete(root)
        _run("tar", "--create", f"--file={file}", f"--directory={root}", "--one-file-system", ".")


def _complete(root: Path) -> None:
    """As images of Python are: `python` is there, pip installs for all, certificates are ours."""
    for name in _LEFT_OUT:
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).mkdir()
    (root / _MANAGED).unlink()
    (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    (root / _CERTIFICATES).write_bytes(_certificates())
    said = "".join(f"{name} = {value}\n" for name, value in _pip_settings())
    (root / "etc/pip.conf").write_text(f"[global]\ncert = /{_CERTIFICATES}\n{said}")


def _certificates() -> bytes:
    return (Path("/") / _CERTIFICATES).read_bytes()


def _pip_settings() -> list[tuple[str, str]]:
    return sorted(dict(_said_to_pip()).items())


def _said_to_pip() -> Iterator[tuple[str, str]]:
    """From its files first, from the environment last, as pip itself weighs them."""
    said = _run(sys.executable, "-m", "pip", "config", "list").splitlines()
    for line in sorted(said, key=lambda line: line.startswith(":env:")):
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in _PIP:
            yield name, str(literal_eval(value))


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr or done.stdout[-2000:]}")
    return done.stdout
