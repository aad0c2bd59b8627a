"""Functions as processes: one with an emulated GPU, a plain one, one in a container's layout."""

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from gateway_ext.model import Endpoint
from tests.kit.nodes.node_thread import node_thread
from tests.kit.places import ROOT
from tests.kit.processes.gpu_functions import FLAG, MODEL, TEMPLATE, Shim, answer
from tests.kit.processes.process_functions import World, call, template_text, world
from tests.kit.waiting import eventually

pytestmark = pytest.mark.group("real", seconds=60)


async def test_function_computes_on_the_nodes_gpu_and_a_plain_one_on_its_own_cpu() -> None:
    with node_thread() as node:
        async with world(Shim(node)) as there:
            for name in ("gpu", "plain"):
                there.build(name, MODEL)
            gpu, plain = await there.deploy("gpu", process=FLAG), await there.deploy("plain")
            (here,), (elsewhere,) = await there.ready(plain), await there.ready(gpu)
            expected, found = await answer(here), await answer(elsewhere)
            assert expected["device"] == "cpu"
            assert found["device"] == "cuda"
            assert found["scores"][0] == pytest.approx(expected["scores"][0], rel=1e-5, abs=1e-6)
            assert await template_text(there, gpu) == "imported", "its weights can be forked"
            assert node.pids(), "no model was loaded: it was computed in the function"


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
