"""Models whose inputs are of a program's classes run on a worker, captured."""

import json
from pathlib import Path

import pytest

from tests.kit.processes.two_nodes import TwoNodes
from tests.kit.programs.data_functions import one_node

pytestmark = pytest.mark.group("tensor_classes", seconds=60)

_FUNCTION = """
import json, sys, torch
from torch_shim.process_report import report
from torch_shim.tensors import absent_bytes

class Tagged(torch.Tensor):
    pass

class Asked(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        made = super().__torch_function__(func, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return made + 1 if func is torch.Tensor.mul else made

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256, 256, bias=False)
        torch.nn.init.eye_(self.layer.weight)

    def forward(self, x, p):
        p.add_(1)
        factor = {Tagged: 3, Asked: 5}.get(type(x), 7)
        first, _ = self.layer(x).split(128)
        return x.add_(1), (self.layer(x) * factor), first, p

absent = []
def answers(device):
    found, model = [], Model().to(device)
    for kind in (Tagged, Tagged, torch.Tensor, Asked, Tagged):
        x = torch.full((256, 256), 2.0, device=device).as_subclass(kind)
        p = torch.ones(256, 256, device=device)
        with torch.no_grad():
            written, computed, first, given = model(x, p)
        chosen = computed.index_select(0, torch.tensor([1, 0], device=device))
        absent.append(bool(absent_bytes.absent_of(computed)))
        found.append([kind.__name__, written is x, given is p]
            + [(type(t).__name__, t.sum().item()) for t in (x, p, computed, first, chosen)])
    return found

sys.stdin.readline()
try:
    said = answers("cuda"), answers("cpu"), absent[0], report.counts.local_calls
except Exception as error:
    said = repr(error)
print(json.dumps(said), flush=True)
"""


def test_model_runs_on_a_worker_when_its_input_is_of_a_program_s_class(tmp_path: Path) -> None:
    with TwoNodes(tmp_path) as cluster:
        cluster.scheduler()
        address, _ = one_node(cluster)
        said = json.loads(cluster.program(_FUNCTION, address).ask())

    assert isinstance(said, list), said
    on_gpu, plain, stayed, local_calls = said
    assert on_gpu == plain
    assert stayed, "rows are chosen on the worker"
    assert local_calls == {}
