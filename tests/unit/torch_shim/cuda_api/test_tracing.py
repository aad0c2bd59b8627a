"""Dynamo traces code over handles: the graphs hold PyTorch's own functions, on CUDA devices."""

from tests.kit.programs.snippets import Snippet, failures_of

# As capture has it: a handle is a plain tensor to Dynamo, with the device that it says.
_COMPILE = """
import warnings
warnings.simplefilter("ignore")
import torch._dynamo.variables.builder as builder
from torch_shim.patching import original_of
from torch_shim.tensors.handles import CudaParameter, CudaTensor
from torch_shim.cuda_api.cuda_module import hidden
from torch_shim.patching import assigned
native = builder.infer_subclass_type
builder.infer_subclass_type = (
    lambda value: None if type(value) in (CudaTensor, CudaParameter) else native(value)
)
F, graphs = torch.nn.functional, []
def backend(module, examples):
    assert all(e.device == torch.device("cuda", 0) for e in examples if hasattr(e, "device"))
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        assert not isinstance(value, torch.Tensor) or value.is_cuda, node
    graphs.append(module.graph)
    return module.forward
def both(work, *args):
    with assigned(hidden, accelerator=True):
        traced = torch.compile(work, backend=backend, fullgraph=True)(*args)
    assert len(graphs) == 1
    assert traced.is_cuda and torch.equal(traced, work(*args)), (traced, work(*args))
x, layer = torch.ones(3).cuda(), torch.nn.Linear(3, 3).cuda().eval()
"""

_WORK = """
layer(x) + torch.arange(3, device=x.device) + torch.zeros(3, device="cuda") + x.new_zeros(3) |
x.to("cuda") + x.cuda() + x.to(x) + x.to(device="cuda", dtype=torch.float64) |
x + torch.tensor([1.0, 2, 3], device=x.device) + torch.as_tensor([1.0], device="cuda") |
torch.zeros_like(x) + torch.full_like(x, 2.0) + x.new_full((3,), 1.0) + x.new_tensor([1.0]) |
x * 2 if x.is_cuda and x.device.type == "cuda" and not x.is_cpu and x.get_device() == 0 else x |
x + 1 if torch.cuda.is_available() and torch.cuda.current_device() == 0 else x |
x + torch.cuda.get_device_properties(0).multi_processor_count | x.data + x.detach() |
torch.full((3, 3), float("-inf"), device=x.device).triu(1) + x | x.clone().add_(1).mul_(2) |
x[None].type(torch.float64) + x.double() |
F.embedding(torch.tensor([0], device="cuda"), layer.weight) |
torch.cat([x, x]) + torch.eye(6, device="cuda")[0] + torch.linspace(0, 1, 6, device=x.device) |
(torch.cuda.synchronize(), x + 1)[1] | x + (1 if torch.is_autocast_enabled() else 2) |
F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])
"""


def test_code_is_traced_whole_when_it_names_the_gpu(dynamo_shim: Snippet) -> None:
    programs = {
        work: f"{_COMPILE}\nwith torch.no_grad():\n    both(lambda x: {work}, x)"
        for work in (" ".join(part.split()) for part in _WORK.split(" |"))
    }
    failures = failures_of(dynamo_shim, programs)

    assert failures == {}, "\n".join(failures.values())


def test_graph_names_native_functions_when_traced(dynamo_shim: Snippet) -> None:
    dynamo_shim(
        _COMPILE
        + """
def work(x):
    return torch.zeros(3, device="cuda") + torch.arange(3, device=x.device) + x.to("cuda")
both(work, x)
targets = [original_of(node.target) for node in graphs[0].nodes if node.op == "call_function"]
assert original_of(torch.zeros) in targets and original_of(torch.arange) in targets
assert not any(getattr(target, "__module__", "") and "torch_shim" in str(target.__module__)
               for target in targets)
"""
    )


def test_autocast_is_traced_when_inside_or_outside(dynamo_shim: Snippet) -> None:
    dynamo_shim(
        _COMPILE
        + """
def inside(x):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = layer(x[None])
    with torch.autocast(device_type=x.device.type, enabled=False):
        return y + layer(x[None])
with torch.no_grad():
    both(inside, x)
    graphs.clear()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        both(lambda x: layer(x[None]).softmax(-1), x)
"""
    )


def test_default_device_and_autograd_function_are_traced_when_used(dynamo_shim: Snippet) -> None:
    dynamo_shim(
        _COMPILE
        + """
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, g):
        return g * 2
both(lambda x: Double.apply(x) + 1, x.clone().requires_grad_())
graphs.clear()
torch.set_default_device("cuda")
both(lambda x: torch.zeros(3) + torch.ones(3) + x, x)
"""
    )
