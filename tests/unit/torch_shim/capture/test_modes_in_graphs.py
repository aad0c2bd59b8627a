"""Modes that a program enters inside of its graphs: inference mode, gradients, autocast."""

import pytest

from tests.kit.programs.snippets import Snippet

MODELS = """
import torch
from torch import nn
from torch_shim.process_report import report

# What a program lacks here that a worker knows.
NO_MANAGER = "no GPU manager was named (GPUFAAS_ADDRESS)"

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(4, 4))

class Decorated(Model):
    @torch.inference_mode()
    def forward(self, x):
        self.cache[1:3] = self.a(x)
        return self.b(self.cache[:3]), self.cache[:2], x.t()

class Entered(Model):
    def forward(self, x):
        y = self.a(x)
        with torch.inference_mode(mode=True):
            z = self.b(y)
        return y, z, z[0], z + 1

class Left(Model):
    @torch.inference_mode()
    def forward(self, x):
        y = self.a(x)
        with torch.inference_mode(False):
            z = self.b(x)
        return y, z

class Unrecorded(Model):
    @torch.no_grad()
    def forward(self, x):
        self.cache[1:3] = self.a(x)
        return self.b(self.cache[:3]), self.a.weight.t()

class Enabled(Model):
    def forward(self, x):
        y = self.a(x)
        with torch.enable_grad():
            z = self.b(y)
        return y, z

def kinds(device, model, around):
    torch.manual_seed(0)
    model = model().to(device)
    found = []
    for _ in range(3):
        x = torch.ones(2, 4, device=device)
        with around():
            outputs = model(x)
        found.append([(o.is_inference(), o.requires_grad, o.sum().item()) for o in outputs])
    if outputs[-1].requires_grad and not outputs[-1].is_inference():
        outputs[-1].sum().backward()
        found.append([w.grad is None or w.grad.sum().item() for w in model.parameters()])
    return found
"""


@pytest.mark.parametrize("around", ["torch.enable_grad", "torch.no_grad", "torch.inference_mode"])
@pytest.mark.parametrize("model", ["Decorated", "Entered", "Left", "Unrecorded", "Enabled"])
def test_outputs_are_of_the_mode_that_forward_made_them_in(
    tracing_shim: Snippet, model: str, around: str
) -> None:
    tracing_shim(f"""{MODELS}
on_gpu, plain = (kinds(device, {model}, {around}) for device in ("cuda", "cpu"))
assert on_gpu == plain, (on_gpu, plain)
reasons = set(report.counts.local_calls) - {{"backward"}}
assert reasons == {{NO_MANAGER}}, reasons
""")


def test_inference_tensor_refuses_a_write_outside_of_its_mode(tracing_shim: Snippet) -> None:
    tracing_shim(f"""{MODELS}
answer, *_ = Decorated().cuda()(torch.ones(2, 4, device="cuda"))
try:
    answer.add_(1)
except RuntimeError as error:
    assert "inference tensor" in str(error), error
else:
    raise AssertionError("it was written to")
with torch.inference_mode():
    answer.add_(1)
""")


@pytest.mark.parametrize(
    "mode",
    [
        "torch.inference_mode()",
        "torch.no_grad()",
        "torch.enable_grad()",
        "torch.autocast('cuda', dtype=torch.bfloat16)",
    ],
)
def test_mode_ends_with_the_call_when_its_graph_fails(tracing_shim: Snippet, mode: str) -> None:
    tracing_shim(f"""{MODELS}
class Failing(Model):
    def forward(self, x):
        with {mode}:
            return torch.vmap(torch.linalg.inv)((self.a.weight * 0 + x)[None])

def modes():
    autocast = torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled("cpu")
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast

model = Failing().cuda()
model(torch.eye(4, device="cuda"))
before, raised = modes(), None
for _ in range(2):
    try:
        model(torch.zeros(4, 4, device="cuda"))
    except RuntimeError as error:
        raised = error
    assert modes() == before, modes()
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
assert "singular" in str(raised), raised
""")


def test_forward_reads_the_dtypes_of_cudas_autocast_when_it_is_traced(
    tracing_shim: Snippet,
) -> None:
    tracing_shim(f"""{MODELS}
class Reading(Model):
    def forward(self, x):
        made = [x.softmax(-1), x.exp(), x**2, x.relu(), torch.exp(x, out=torch.empty_like(x))]
        return [self.a.weight.to(y.dtype) for y in made]

half = torch.ones(2, 4, device="cuda").bfloat16()
with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
    kinds = [y.dtype for y in Reading().cuda()(half)]
assert report.counts.graphs == 1 and kinds == [torch.float32] * 3 + [torch.bfloat16] * 2, kinds
""")


def test_inference_tensor_is_refused_by_backward_s_operators_alone(tracing_shim: Snippet) -> None:
    tracing_shim(f"""{MODELS}
class Inside(Model):
    def forward(self, x):
        with torch.inference_mode():
            y = self.a(x)
        return self.b(y)

class Copied(Model):
    def forward(self, x):
        with torch.inference_mode():
            y = self.a(x)
        return self.b(y.clone())

class Within(Model):
    def forward(self, x):
        y = x + 1
        with torch.inference_mode(False):
            return self.b(y)

class Added(Model):
    def forward(self, x):
        return x + self.a.bias

class Held(Model):
    def forward(self, x):
        return self.b.bias * self.cache

def outcomes(device, model, around, given):
    torch.manual_seed(0)
    model, x = model().to(device), torch.ones(2, 4, device=device)
    with torch.inference_mode():
        unsaved = torch.ones(2, 4, device=device)
        if given == "cache":
            model.cache = torch.ones(4, 4, device=device)
    found = []
    for _ in range(3):
        try:
            with around():
                y = model(unsaved if given == "unsaved" else x)
        except RuntimeError as error:
            found.append(str(error))
        else:
            found.append((y.is_inference(), y.requires_grad, y.sum().item()))
    return found

cases = [
    (Inside, "x"), (Copied, "x"), (Within, "x"), (Added, "unsaved"), (Held, "cache"), (Held, "x")
]
refused = 0
for model, given in cases:
    for around in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        here, plain = (outcomes(d, model, around, given) for d in ("cuda", "cpu"))
        assert here == plain, (model, around, here, plain)
        refused += "cannot be saved for backward" in str(plain)
assert refused == 3, refused
report.counts.local_calls.clear()
outcomes("cuda", Copied, torch.enable_grad, "x")
assert report.counts.local_calls == {{NO_MANAGER: 3}}, report.counts
""")


@pytest.mark.parametrize("is_inside", [False, True])
def test_autocast_runs_in_float32_what_cudas_does_when_a_graph_runs_here(
    tracing_shim: Snippet, *, is_inside: bool
) -> None:
    entered = ['torch.autocast("cuda", torch.bfloat16)', "contextlib.nullcontext()"]
    inside, outside = entered if is_inside else entered[::-1]
    tracing_shim(f"""{MODELS}
import contextlib
F = nn.functional

class Widened(Model):
    def forward(self, x):
        with {inside}:
            y = self.a(x)
            pieces = y.softmax(-1), F.softmax(y, -1), y.exp(), y**2, y.sum(), F.layer_norm(y, (4,))
            return y, F.mse_loss(y, y), *pieces

model = Widened().cuda()
for _ in range(3):
    with {outside}:
        first, *others = model(torch.ones(2, 4, device="cuda"))
    assert first.dtype is torch.bfloat16, first.dtype
    assert {{other.dtype for other in others}} == {{torch.float32}}, [o.dtype for o in others]
""")
