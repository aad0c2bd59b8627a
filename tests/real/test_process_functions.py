"""Functions as processes: one with an emulated GPU, a plain one, one in a container's layout."""

import asyncio
import shutil
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import yaml

from common.gpu_wishes import GpuWishes
from gateway_ext.model import Endpoint, FunctionId
from gateway_ext.providers.process.settings import base_python
from tests.kit.nodes.node_thread import node_thread
from tests.kit.places import ROOT
from tests.kit.processes.gpu_functions import FLAG, MODEL, TEMPLATE, Shim, answer
from tests.kit.processes.process_functions import World, call, template_text, world
from tests.kit.processes.runtime_process import Unix
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


async def test_templates_of_all_examples_are_warm() -> None:
    functions = yaml.safe_load((ROOT / "stack.yml").read_text())["functions"]
    with node_thread() as node:
        async with world(Shim(node)) as there:
            for name, entry in functions.items():
                shutil.copytree(ROOT / entry["handler"], there.builds / name / "function")
                gpu = "" if "com.gpufaas.enabled" in entry["annotations"] else FLAG
                f = await there.deploy(name, process=gpu)
                await eventually(partial(is_warm, there, f), f"{name} is warm")


async def is_warm(there: World, function: FunctionId) -> bool:
    """Whether its example calls were made; an error where they failed."""
    text = await template_text(there, function)
    assert "not warm" not in text, text
    return text == "warm"


GATED = """
import os, time
answered = handle
def handle(event, context):
    while event.body == b"wait" and not os.path.exists(os.environ["GATE"]):
        time.sleep(0.01)
    return answered(event, context)
"""


class InBackground(Shim):
    """As functions trace: those before traced while their call waited."""

    def environment(self, function: FunctionId, wishes: GpuWishes) -> Mapping[str, str]:
        return {**super().environment(function, wishes), "GPUFAAS_TRACING": "background"}


async def test_answer_says_that_its_graph_was_traced_meanwhile() -> None:
    with node_thread() as node:
        async with world(InBackground(node)) as there:
            there.build("f", MODEL)
            (endpoint,) = await there.ready(await there.deploy("f", process=FLAG))
            assert local(endpoint) == (
                "tracing: this call ran on the processor while its graph was traced; later calls"
                " with such inputs use the GPU (docs/functions.md#first-calls)"
            )


async def test_first_call_uses_the_gpu_when_the_example_was_made_after_the_first_start() -> None:
    with node_thread() as node:
        async with world(InBackground(node)) as there:
            (there.build("f", MODEL + GATED) / "example.json").write_text('{"body": "wait"}')
            gate = there.builds / "gate"
            f = await there.deploy("f", process=FLAG, environment={"GATE": str(gate)})
            (first,) = await there.ready(f)
            gate.touch()
            await eventually(partial(is_warm, there, f), "f is warm")
            await eventually(
                lambda: (
                    len(there.heard.endpoints[f]) == 1 and first not in there.heard.endpoints[f]
                ),
                "another one has taken the place of the first",
            )
            (endpoint,) = there.heard.endpoints[f]
            assert local(endpoint) is None


def local(endpoint: Endpoint) -> str | None:
    """What a call says of its work on the processor."""
    connection = Unix(endpoint.address.removeprefix("unix:"))
    connection.request("POST", "/")
    told = connection.getresponse().headers["X-Gpu-Local"]
    connection.close()
    return told


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
        base_python(there.settings), app / "runtime", "--gpu", cwd=app, env=environment
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
