"""A user's project with folders of our names, in it gpufaas as it is installed: from a wheel."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.kit.places import ROOT
from tests.kit.programs.own_names import IMPORTS, write_own_names

_ON_GPU = """
import torch
model = torch.nn.Linear(4, 2).cuda()
with torch.no_grad():
    answers = [model(torch.ones(1, 4).cuda()).cpu() for _ in range(3)]
assert torch.equal(answers[0], answers[2])
import gpufaas
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel lays into an environment."""
    made = tmp_path_factory.mktemp("wheel")
    build = ("-m", "hatchling", "build", "--target", "wheel", "--directory", str(made))
    subprocess.run([sys.executable, *build], cwd=ROOT, check=True, capture_output=True)
    (wheel,) = made.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(made / "site")
    return made / "site"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_own_names(tmp_path)
    (tmp_path / "script.py").write_text(IMPORTS + _ON_GPU + IMPORTS)
    return tmp_path


def test_wheel_takes_one_name(installed: Path) -> None:
    names = [path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")]
    assert names == ["gpufaas"]


@pytest.mark.parametrize("start", [("exec", "--devices", "cpu:1", "--"), ("check",)])
@pytest.mark.parametrize("path", [("-m",), ("-P", "-m")], ids=["current-folder", "safe-path"])
def test_program_has_its_own_folders_and_gpufaas_has_its_own(
    installed: Path, project: Path, start: tuple[str, ...], path: tuple[str, ...]
) -> None:
    program = [sys.executable, "script.py"] if start[0] == "exec" else ["script.py"]
    done = subprocess.run(
        [sys.executable, *path, "gpufaas", *start, *program],
        cwd=project,
        env={"PATH": os.defpath, "HOME": str(project), "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_checkout_takes_one_name_in_its_environment(tmp_path: Path) -> None:
    program = "import gpufaas, sys\ntry: import scheduler\nexcept ImportError: sys.exit(9)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env={}, check=False)
    assert done.returncode == 9
