"""Functions as processes with an emulated GPU, of builds that the real faas-cli makes."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kit.engines.faas_cli import NoFaasCli, faas_cli
from tests.kit.nodes.node_thread import node_thread
from tests.kit.places import ROOT
from tests.kit.processes.gpu_functions import FLAG, TEMPLATE, Shim, answer
from tests.kit.processes.process_functions import world

pytestmark = [pytest.mark.faas_cli, pytest.mark.group("process_functions", seconds=20)]


async def test_new_function_of_the_template_runs_when_faas_cli_has_built_it(tmp_path: Path) -> None:
    _clone(tmp_path)
    _faas_cli(tmp_path, "new", "mine", "--lang", TEMPLATE, "--append", "stack.yml")
    assert "--gpu" in (tmp_path / "template" / TEMPLATE / "template.yml").read_text()
    _faas_cli(tmp_path, "build", "--shrinkwrap", "-f", "stack.yml", "--filter", "mine")

    with node_thread() as node:
        async with world(Shim(node)) as there:
            shutil.copytree(tmp_path / "build" / "mine", there.builds / "mine")
            mine = await there.deploy("mine", process=FLAG)
            (endpoint,) = await there.ready(mine)
            found = await answer(endpoint)
            assert found["device"] == "cuda"
            assert len(found["scores"][0]) == 2


def test_build_has_all_that_a_container_needs_when_faas_cli_has_made_it(tmp_path: Path) -> None:
    _clone(tmp_path)
    _faas_cli(tmp_path, "build", "--shrinkwrap", "-f", "stack.yml")
    for name in ("classify", "generate", "pipeline", "hello"):
        build = tmp_path / "build" / name
        for path in ("Dockerfile", "function/handler.py", "runtime/__main__.py"):
            assert (build / path).is_file()
        assert (build / "torch_shim" / "activate" / "sitecustomize.py").is_file()
        assert not (build / "runtime").is_symlink()


def _clone(folder: Path) -> None:
    """What faas-cli sees of a clone; the template's links lead out of it, so they are kept."""
    for name in ("template", "functions", "gateway_ext", "torch_shim"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True)
    shutil.copy(ROOT / "stack.yml", folder)


def _faas_cli(folder: Path, *arguments: str) -> None:
    try:
        command = [str(faas_cli()), *arguments]
    except NoFaasCli as error:
        pytest.skip(str(error))
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
