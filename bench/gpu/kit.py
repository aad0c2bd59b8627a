"""The kit of `make gpu`: what a machine with a GPU lacks, as wheels in one folder.

`python -m bench.gpu.kit build` downloads the wheels (`make gpu-kit`). `python -m bench.gpu.kit run`
needs the standard library alone: where the Python that runs it lacks a package, it makes an
environment of that Python's own packages and the kit's wheels, and runs `bench.gpu` there.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator, Sequence, Set
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
KIT = ROOT / "out" / "gpu-kit"
ENVIRONMENT = ROOT / "out" / "gpu-python"
# The kit travels with the checkout, where 64 MiB are often the most that may.
MOST_BYTES = 8 << 20

# What such a machine lacks: all else is there, in versions that suit its torch. Every requirement
# of these that a machine with torch and its usual company lacks is listed, too.
CARRIED = (
    "aetcd",
    "annotated-types",
    "fastapi",
    "httptools",
    "msgspec",
    "nats-py",
    "opentelemetry-api",
    "pydantic",
    "pydantic-core",
    "pytest-asyncio",
    "starlette",
    "typing-extensions",
    "typing-inspection",
    "uvicorn",
)
_NEEDED = (
    "accelerate",
    "aetcd",
    "aiohttp",
    "fastapi",
    "httptools",
    "hypothesis",
    "msgspec",
    "nats",
    "prometheus_client",
    "pynvml",
    "pytest",
    "pytest_asyncio",
    "pytest_timeout",
    "safetensors",
    "timm",
    "transformers",
    "uvicorn",
    "uvloop",
    "xdist",
    "yaml",
)
_NEWEST_GLIBC, _OLDEST_GLIBC = 34, 5
_PATH_FILE = "gpufaas-gpu.pth"


class KitFailed(Exception):
    """The kit could not be built, or does not suit this Python."""


def main(arguments: Sequence[str]) -> int:
    """Build the kit, or run the benches with it."""
    parser = argparse.ArgumentParser(prog="bench.gpu.kit", description=__doc__, allow_abbrev=False)
    parser.add_argument("order", choices=["build", "run"])
    parser.add_argument("--kit", type=Path, default=KIT, help="the folder of the wheels")
    parser.add_argument("--environment", type=Path, default=ENVIRONMENT, help="made by `run`")
    parser.add_argument("--module", default="bench.gpu", help="what `run` runs (bench.gpu)")
    parser.add_argument("--python-version", default="3.12", help="that the wheels are for (3.12)")
    parser.add_argument("--pip", default=f"{sys.executable} -m pip", help="the command of a pip")
    options, rest = parser.parse_known_args(arguments)
    try:
        if options.order == "build":
            build(options.kit, options.python_version, options.pip.split())
            return 0
        python = ready_python(options.kit, options.environment)
    except KitFailed as error:
        print(f"bench.gpu.kit: {error}", file=sys.stderr)
        return 1
    os.chdir(ROOT)
    return os.execv(python, [python, "-m", options.module, *rest])


# -- on a machine with a network -----------------------------------------------------------------


def build(kit: Path, python_version: str, pip: Sequence[str]) -> None:
    """Download the wheels that are not in the folder yet, and remove all others."""
    pins = {name: metadata.version(name) for name in CARRIED}
    kit.mkdir(parents=True, exist_ok=True)
    have = {_project_of(wheel): wheel for wheel in kit.glob("*.whl")}
    for project, wheel in have.items():
        if pins.get(project) != _version_of(wheel) or not suits(wheel, python_version):
            wheel.unlink()
    lacking = {
        project: version
        for project, version in pins.items()
        if project not in have or not have[project].exists()
    }
    if lacking:
        _download(kit, python_version, pip, lacking)
    total = sum(wheel.stat().st_size for wheel in kit.glob("*.whl"))
    print(f"{kit}: {len(pins)} wheels for Python {python_version}, {total / (1 << 20):.1f} MiB")
    if total > MOST_BYTES:
        raise KitFailed(f"the kit has {total} bytes, and {MOST_BYTES} are the most")


def _download(kit: Path, python_version: str, pip: Sequence[str], pins: dict[str, str]) -> None:
    platforms = [f"manylinux_2_{n}_x86_64" for n in range(_NEWEST_GLIBC, _OLDEST_GLIBC - 1, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "any"]
    command = [*pip, "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", python_version]
    command += ["--implementation", "cp", "--dest", str(kit)]
    for platform in platforms:
        command += ["--platform", platform]
    command += [f"{name}=={version}" for name, version in pins.items()]
    if subprocess.run(command, check=False).returncode:
        raise KitFailed("pip has not downloaded the wheels; its words are above")


# -- on a machine with a GPU ---------------------------------------------------------------------


def ready_python(kit: Path, environment: Path) -> str:
    """A Python that has every package: the one that runs this, or one made of it and the kit."""
    missing = lacking()
    if not missing:
        return sys.executable
    wheels = [wheel for wheel in sorted(kit.glob("*.whl")) if suits(wheel, _own_version())]
    if not wheels:
        raise KitFailed(
            f"this Python lacks {', '.join(missing)}, and {kit} has no wheels for Python "
            f"{_own_version()}: run `make gpu-kit` where there is a network, and carry {kit}"
        )
    python = str(_make_environment(wheels, environment))
    rest = [python, "-c", "from bench.gpu import kit; print(', '.join(kit.lacking()))"]
    still = subprocess.run(rest, check=True, capture_output=True, text=True).stdout.strip()
    if still:
        raise KitFailed(f"{sys.executable} lacks {still}, which the kit does not have: install it")
    return python


def lacking() -> list[str]:
    """The modules that this Python cannot import."""
    return [name for name in _NEEDED if find_spec(name) is None]


def suits(wheel: Path, python_version: str) -> bool:
    """Whether a Python of this version can import the wheel, by its file's name."""
    *_, pythons, abis, _platform = wheel.stem.split("-")
    own = "cp" + python_version.replace(".", "")
    minor = int(python_version.split(".")[1])
    for python in pythons.split("."):
        for abi in abis.split("."):
            if python == own and abi in {own, "none", "abi3"}:
                return True
            if python in {"py3", f"py{own[2:]}"} and abi == "none":
                return True
            if abi == "abi3" and python.startswith("cp3") and int(python[3:]) <= minor:
                return True
    return False


def _make_environment(wheels: Sequence[Path], environment: Path) -> Path:
    """An environment with the wheels first, then this Python's own packages and the checkout."""
    python = environment / "bin" / "python"
    stamp = environment / "made-of"
    made_of = "\n".join([sys.executable, sys.version, *(wheel.name for wheel in wheels)])
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == made_of and python.exists():
        return python
    shutil.rmtree(environment, ignore_errors=True)
    venv.EnvBuilder(symlinks=True).create(environment)
    (packages,) = environment.glob("lib/python3*/site-packages")
    for wheel in wheels:
        _unpack(wheel, packages)
    carried = {_project_of(wheel) for wheel in wheels}
    for folder in _own_packages():
        _link(folder, packages, carried)
    (packages / _PATH_FILE).write_text(f"{ROOT}\n", encoding="utf-8")
    stamp.write_text(made_of, encoding="utf-8")
    print(f"{len(wheels)} wheels of the kit unpacked beside {sys.executable}'s own", flush=True)
    return python


def _unpack(wheel: Path, packages: Path) -> None:
    """The wheel's modules; programs and data of it are not needed."""
    data = re.compile(r"[^/]+\.data/(?:purelib|platlib)/(.+)")
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            inside = data.fullmatch(entry.filename)
            if inside:
                entry.filename = inside[1]
            elif ".data/" in entry.filename.partition("/")[0] + "/":
                continue
            archive.extract(entry, packages)


def _link(source: Path, packages: Path, carried: Set[str]) -> None:
    """Have what lies in the one folder in the other as well, where the kit does not carry it.

    Links, since the functions of a stack look for packages in this one folder.
    """
    for entry in source.iterdir():
        place = packages / entry.name
        described = entry.name.endswith((".dist-info", ".egg-info"))
        if entry.suffix == ".pth" or (described and _project_of(entry) in carried):
            continue
        if not place.is_symlink() and not place.exists():
            place.symlink_to(entry)


def _own_packages() -> Iterator[Path]:
    """The folders of packages that this Python sees."""
    for entry in map(Path, sys.path):
        if entry.name in {"site-packages", "dist-packages"} and entry.is_dir():
            yield entry


def _own_version() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def _project_of(wheel: Path) -> str:
    return _normal(wheel.name.split("-")[0])


def _version_of(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
