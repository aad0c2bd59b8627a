"""Functions as processes with an emulated GPU, and builds that the real faas-cli makes."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import torch_shim
from common.gpu_wishes import GpuWishes
from gateway_ext.model import Endpoint, FunctionId
from testbed.nodes.node_thread import NodeThread, node_thread
from tests.kit.engines.faas_cli import NoFaasCli, faas_cli
from tests.kit.places import ROOT
from tests.kit.processes.process_functions import World, call, template_text, world
from tests.kit.waiting import eventually

TEMPLATE = "python3-torch-gpu"
FLAG = "python /home/app/runtime --gpu"
MODEL = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = torch.nn.Linear(1000, 500).eval().to(device)
def handle(event, context):
    with torch.no_grad():
        return {"device": device, "scores": model(torch.ones(1, 1000, device=device)).tolist()}
"""


class Shim:
    """Wakes the shim up, as the gateway does."""

    def __init__(self, node: NodeThread) -> None:
        self._node = node

    def environment(self, function: FunctionId, _wishes: GpuWishes) -> Mapping[str, str]:
        return {
            "GPUFAAS_ENABLED": "1",
            "GPUFAAS_ADDRESS": self._node.address,
            "GPUFAAS_CREDENTIAL": self._node.credential(function.namespace, function.name),
            "GPUFAAS_TRACING": "wait",
            "PYTHONPATH": str(Path(torch_shim.__file__).parent / "activate"),
        }


async def test_function_computes_on_the_nodes_gpu_and_a_plain_one_on_its_own_cpu() -> None:
    with node_thread() as node:
        async with world(Shim(node)) as there:
            for name in ("gpu", "plain"):
                there.build(name, MODEL)
            gpu, plain = await there.deploy("gpu", process=FLAG), await there.deploy("plain")
            (here,), (elsewhere,) = await there.ready(plain), await there.ready(gpu)
            expected, found = await _answer(here), await _answer(elsewhere)
            assert expected["device"] == "cpu"
            assert found["device"] == "cuda"
            assert found["scores"][0] == pytest.approx(expected["scores"][0], rel=1e-5, abs=1e-6)
            assert await template_text(there, gpu) == "imported", "its weights can be forked"
            assert node.pids(), "no model was loaded: it was computed in the function"


@pytest.mark.faas_cli
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
            answer = await _answer(endpoint)
            assert answer["device"] == "cuda"
            assert len(answer["scores"][0]) == 2


@pytest.mark.faas_cli
def test_build_has_all_that_a_container_needs_when_faas_cli_has_made_it(tmp_path: Path) -> None:
    _clone(tmp_path)
    _faas_cli(tmp_path, "build", "--shrinkwrap", "-f", "stack.yml")
    for name in ("classify", "generate", "pipeline", "hello"):
        build = tmp_path / "build" / name
        for path in ("Dockerfile", "function/handler.py", "runtime/__main__.py"):
            assert (build / path).is_file()
        assert (build / "torch_shim" / "activate" / "sitecustomize.py").is_file()
        assert not (build / "runtime").is_symlink()


async def test_container_layout_serves_without_the_rest_of_the_project(tmp_path: Path) -> None:
    app = tmp_path / "app"
    shutil.copytree(ROOT / "template" / TEMPLATE, app)  # links followed, as faas-cli does

    async with world() as there:
        await _serve(there, app)


async def _serve(there: World, app: Path) -> None:
    """Starts the runtime as the Dockerfile does, on a socket instead of a port."""
    path = there.folder / "s"
    environment = {"PATH": "/usr/bin:/bin", "GPUFAAS_LISTEN": f"unix:{path}"}
    environment["PYTHONPATH"] = str(app / "torch_shim" / "activate")
    (app / "function" / "handler.py").write_text("def handle(event, context):\n    return 'ok'\n")
    process = await asyncio.create_subprocess_exec(
        there.settings.base_python, app / "runtime", "--gpu", cwd=app, env=environment
    )
    try:

        async def is_answered() -> bool:
            with suppress(FileNotFoundError, ConnectionRefusedError):  # it does not listen yet
                return await call(Endpoint("i", f"unix:{path}")) == b"ok"
            return False

        await eventually(is_answered, "the answer of the function")
    finally:
        process.terminate()
        assert await process.wait() == 0


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


async def _answer(endpoint: Endpoint) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await call(endpoint))
    return found
