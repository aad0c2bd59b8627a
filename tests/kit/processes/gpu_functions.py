"""Functions as processes whose models compute on a node of the test's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch_shim
from common.gpu_wishes import GpuWishes
from gateway_ext.model import Endpoint, FunctionId
from tests.kit.nodes.node_thread import NodeThread
from tests.kit.processes.process_functions import call

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


async def answer(endpoint: Endpoint) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await call(endpoint))
    return found
