"""A captured model takes the branches that torch takes for tensors of a program's classes."""

from tests.kit.programs.snippets import Snippet

_CLASSES = """
from torch_shim.capture import graphs
class Tagged(torch.Tensor):
    factor = 7
    def tripled(self):
        return self * 3
    @classmethod
    def made_of(cls, x):
        return x.as_subclass(cls)
class Derived(Tagged):
    pass
class Asked(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        made = super().__torch_function__(func, types, args, kwargs or {})
        if getattr(func, "__name__", "") == "mul":
            with torch._C.DisableTorchFunctionSubclass():
                made = made + 1
        return made
class Image(torch.Tensor):  # as torchvision's: what is computed from it is plain
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        return made.as_subclass(torch.Tensor) if isinstance(made, cls) else made
    @property
    def device(self):
        with torch._C.DisableTorchFunctionSubclass():
            return super().device
class Operators(torch.Tensor):
    def __add__(self, other):
        return self * 10
class Weight(torch.nn.Parameter):
    pass
class Model(torch.nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.layer, self.compute = torch.nn.Linear(2, 2, bias=False), compute
        torch.nn.init.ones_(self.layer.weight)
        self.weight = Weight(torch.full((2, 2), 2.0))
        self.register_buffer("tagged", torch.full((2, 2), 4.0).as_subclass(Tagged))
    def forward(self, *args):
        return self.compute(self, *args)
ran = []
run = graphs.Graph.__call__
graphs.Graph.__call__ = lambda graph, *args: ran.append(graph) or run(graph, *args)
def unwrapped(x):
    with torch._C.DisableTorchFunctionSubclass():
        return x * 2
"""

_COMPUTATIONS = """
computations = dict(
    isinstance=lambda m, x: m.layer(x) * (2 if isinstance(x, Tagged) else 5),
    computed=lambda m, x: m.layer(x) * (2 if isinstance(m.layer(x), Tagged) else 5),
    type=lambda m, x: m.layer(x) * (2 if type(x) is Tagged else 5),
    derived=lambda m, x: m.layer(x) * (2 if issubclass(type(x), Tagged) else 5),
    its_class=lambda m, x: m.layer(x) * (2 if x.__class__ is Asked else 5),
    table=lambda m, x: m.layer(x) * {Tagged: 2, Asked: 3, Image: 4}.get(type(x), 5),
    method=lambda m, x: m.layer(x).tripled() if isinstance(m.layer(x), Tagged) else x * 4,
    made=lambda m, x: type(x).made_of(m.layer.weight * 2) if isinstance(x, Tagged) else x * 4,
    attribute=lambda m, x: x * getattr(x, "factor", 2),
    asked=lambda m, x: m.layer(x) * 2,
    unwrapped=lambda m, x: unwrapped(x),
    device=lambda m, x: x * (2 if x.device == m.layer.weight.device else 3),
    split=lambda m, x: x.split(1)[0] * 2,
    type_as=lambda m, x: x.to(torch.float64) * 2,
    size=lambda m, x: m.layer(x) * x.size(0) + x.numel() + x.stride(0) + x.is_contiguous(),
    buffer=lambda m, x: m.layer.weight * m.tagged + isinstance(m.layer.weight * m.tagged, Tagged),
    weight=lambda m, x: x * m.weight + isinstance(m.weight, Weight),
    operators=lambda m, x: x + 1,
)
"""


def test_model_takes_torch_s_branches_when_its_input_is_of_a_program_s_class(
    tracing_shim: Snippet,
) -> None:
    tracing_shim(f"""{_CLASSES}{_COMPUTATIONS}
kinds = [Tagged, torch.Tensor, Asked, Operators, Image, Derived, torch.Tensor, Tagged]
def answers(device, compute):
    model, found = Model(compute).to(device), []
    for kind in kinds:
        for _ in range(2):
            ran.clear()
            with torch.no_grad():
                answer = model(torch.full((2, 2), 2.0, device=device).as_subclass(kind))
            found.append((kind, answer.tolist(), type(answer).__name__))
        assert device == "cpu" or bool(ran) == (kind is not Operators), (name, kind)
    return found
for name, compute in computations.items():
    on_gpu, plain = answers("cuda", compute), answers("cpu", compute)
    assert on_gpu == plain, (name, *zip(on_gpu, plain))
""")


def test_input_keeps_identity_and_class_when_a_graph_writes_to_it(tracing_shim: Snippet) -> None:
    tracing_shim(f"""{_CLASSES}
model = Model(lambda m, x, p: (x.mul_(2), p.add_(x), m.layer(x))).cuda()
x = torch.ones(2, 2, device="cuda").as_subclass(Tagged)
x.note, p = "kept", torch.ones(2, 2, device="cuda")
with torch.no_grad():
    for factor in (2, 4):
        written, added, computed = model(x, p)
        assert written is x and x.note == "kept" and x.tolist() == [[factor] * 2] * 2
        assert type(p) is type(model.layer.weight.data) and type(computed) == Tagged
        # As in torch: another tensor of this memory.
        assert type(added) == Tagged and added.data_ptr() == p.data_ptr()
assert len(ran) == 2
""")


def test_class_s_function_is_not_traced_between_two_graphs(tracing_shim: Snippet) -> None:
    # Dynamo's guards do not tell apart the operators that it is called with.
    tracing_shim("""
import torch
class Noted(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
    def forward(self, x):
        for _ in range(2):  # in a loop a break leaves the whole frame untraced
            torch._dynamo.graph_break()
            made = self.layer(x) * x.numel() + x.stride(0) + x.is_contiguous()
        return made
frames = []
trace = torch._dynamo.convert_frame._compile
torch._dynamo.convert_frame._compile = (
    lambda code, *args, **options: frames.append(code) or trace(code, *args, **options))
model, x = Model().cuda(), torch.ones(2, 2, device="cuda").as_subclass(Noted)
with torch.no_grad():
    for _ in range(3):
        model(x)
code = Noted.__torch_function__.__func__.__code__
assert frames and code not in frames, frames
""")


def test_attributes_are_shown_when_dynamo_reads_them_by_its_name_of_torch_2_11(
    dynamo_shim: Snippet,
) -> None:
    dynamo_shim("""
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch_function import TensorWithTFOverrideVariable
from torch_shim.capture import dynamo
for kind in (VariableTracker, TensorVariable, TensorWithTFOverrideVariable):
    kind.var_getattr = vars(kind)["tp_getattro_impl"]
    del kind.tp_getattro_impl
dynamo.configure()
assert TensorWithTFOverrideVariable.var_getattr.__wrapped__
""")


def test_dynamo_is_configured_again_when_that_failed(dynamo_shim: Snippet) -> None:
    dynamo_shim("""
from torch_shim.capture import dynamo
def fail():
    raise AttributeError
native, dynamo.show_tensor_classes = dynamo.show_tensor_classes, fail
for _ in range(2):
    try:
        dynamo.configure()
    except AttributeError:
        continue
    raise AssertionError("half configured, and nobody is told")
dynamo.show_tensor_classes = native
dynamo.configure()
""")


def test_class_is_asked_as_without_graphs_when_its_function_computes_and_notes(
    tracing_shim: Snippet,
) -> None:
    tracing_shim("""
from torch_shim.capture import graphs
class Tenfold(torch.Tensor):
    noted = []
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Tenfold.noted.append(func.__name__)
        made = super().__torch_function__(func, types, args, kwargs or {})
        return made * 10 if func is torch.relu else made
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
    def forward(self, x):
        return torch.relu(torch.relu(x * self.weight))
made, make = [], graphs.Graph.__init__
graphs.Graph.__init__ = lambda graph, *args: made.append(graph) or make(graph, *args)
def answers(device):
    model, found = Model().to(device), []
    x = torch.ones(2, 3, device=device).as_subclass(Tenfold)
    x.grad = torch.ones(2, 3, device=device)
    for _ in range(4):
        Tenfold.noted.clear()
        with torch.no_grad():
            answer = model(x)
        found.append((list(Tenfold.noted), type(answer).__name__, answer.tolist()))
    return found
on_gpu, plain = answers("cuda"), answers("cpu")
assert on_gpu == plain, (on_gpu[0], plain[0])
assert len(made) == 1, "traced again, though nothing has changed"
""")
