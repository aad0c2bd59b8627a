"""Custom autograd functions in graphs: what follows from their results is on their device."""

from tests.kit.programs.snippets import Snippet

MODELS = """
import torch
from torch import nn
from torch_shim.process_report import report

class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, least):
        kept = (x > least).float()
        ctx.save_for_backward(kept)
        ctx.mark_non_differentiable(kept)
        return x * kept, kept

    @staticmethod
    def backward(ctx, gradient, _):
        return gradient * ctx.saved_tensors[0], None

class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        count = torch.arange(x.shape[-1], device=x.device, dtype=x.dtype)
        return x * count, x.detach().cpu()

    @staticmethod
    def backward(ctx, gradient, _):
        return gradient

class Model(nn.Module):
    def __init__(self, apply):
        super().__init__()
        self.first, self.second, self.apply_function = nn.Linear(4, 4), nn.Linear(4, 4), apply

    def forward(self, x):
        y, other = self.apply_function(self.first(x))
        return self.second(y), y, other

def kept(x):
    return Kept.apply(x, 0.1)

def outcomes(device, function):
    torch.manual_seed(0)
    model, found = Model(function).to(device), []
    for _ in range(3):
        outputs = model(torch.randn(2, 4, device=device))
        model.zero_grad()
        outputs[0].square().sum().backward()
        found.append([(y.requires_grad, y.sum().item()) for y in outputs])
        found.append([w.grad.sum().item() for w in model.parameters()])
    return found, [y.device.type for y in outputs]
"""


def test_result_of_a_custom_function_goes_on_through_the_module(tracing_shim: Snippet) -> None:
    tracing_shim(f"""{MODELS}
for function, last in ((kept, "cuda"), (Counted.apply, "cpu")):
    (here, devices), (plain, _) = (outcomes(device, function) for device in ("cuda", "cpu"))
    assert here == plain, (function, here, plain)
    assert devices == ["cuda", "cuda", last], devices
""")


def test_module_with_a_custom_function_is_one_graph(tracing_shim: Snippet) -> None:
    tracing_shim(f"""{MODELS}
model = Model(kept).cuda()
with torch.no_grad():
    model(torch.ones(2, 4, device="cuda"))
assert report.counts.graphs == 1, report.counts
outcomes("cuda", kept)
assert report.counts.graphs == 2, report.counts
""")


def test_gradients_of_gradients_go_through_a_custom_function(tracing_shim: Snippet) -> None:
    tracing_shim(f"""{MODELS}
class OfInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x ** 3

    @staticmethod
    def backward(ctx, gradient):
        with torch.no_grad():
            shape = ctx.saved_tensors[0].sign().abs()
        return 3 * shape * ctx.saved_tensors[0] ** 2 * gradient

class OfOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        return OfInput.apply(ctx.saved_tensors[0]) / ctx.saved_tensors[0] ** 2 * gradient

class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2

class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.second, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x):
        return self.second(self.function.apply(torch.tanh(self.first(x)))) ** 2

def penalty(device, function):
    torch.manual_seed(0)
    model = Model(function).to(device)
    x = torch.linspace(-1, 1, 8, device=device).view(2, 4).requires_grad_()
    (found,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    found.square().sum().backward()
    given = (x, *(w for w in model.parameters() if w.grad is not None))
    return [found.tolist(), *(value.grad.tolist() for value in given)]

for function in (OfInput, OfOutput, Linear):
    here, plain = (penalty(device, function) for device in ("cuda", "cpu"))
    assert here == plain, (function, here, plain)
""")
