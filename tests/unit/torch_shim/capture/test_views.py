"""Writes to outputs of answered calls reach the views of them, in values and in gradients."""

import pytest

from tests.kit.programs.snippets import Snippet

# A worker's answer is tensors over storages, of which autograd knows no relation.
WORKER = """
import warnings
from torch_shim.capture.dynamo import configure
from torch_shim.capture.graphs import Graph
from torch_shim.capture.roots import Roots, root_of_inputs
from torch_shim.process_report import report
from torch_shim.tensors.write_epochs import storage_of

configure()
warnings.simplefilter("ignore")  # Dynamo reads .grad of inputs, and torch warns of that
answered = []

class Worker:
    random = False

    def __init__(self, module):
        self.module = module

    def run(self, args, *_):
        answered.append(len(args))
        return [self.over(value) for value in self.module.forward(*args)]

    def over(self, value):
        storage = storage_of(value)
        made = torch.empty(0, dtype=value.dtype)
        return made.set_(storage, value.storage_offset(), value.size(), value.stride())

def backend(module, examples):
    graph = Graph(module, examples, Roots("unix:/nowhere", ""))
    graph._loose = root_of_inputs(())
    graph._remote = Worker(graph._local)
    return graph

def gradients(forward, use, device, captured):
    torch.manual_seed(0)
    weight, scale = (torch.rand(*size).to(device).requires_grad_() for size in ((4, 4), (1,)))
    x = torch.rand(2, 4).to(device)
    outputs = captured(forward)(x * scale, weight)
    use(outputs, scale)
    sum(output.abs().square().sum() for output in outputs).backward()
    return weight.grad.cpu(), scale.grad.cpu()

def compared(cases, uses, on_worker):
    for name, forward in cases.items():
        for use in uses:
            before = len(answered)
            torch._dynamo.reset()
            expected = gradients(forward, use, "cpu", lambda function: function)
            found = gradients(
                forward, use, "cuda", lambda function: torch.compile(function, backend=backend)
            )
            assert all(map(torch.allclose, found, expected)), (name, use, found, expected)
            assert (len(answered) > before) == on_worker, name

def scaled_first(outputs, scale):
    outputs[0].mul_(3)

def scaled_last(outputs, scale):
    outputs[0].add_(scale)
    outputs[-1].mul_(3)
"""


@pytest.fixture
def worker_shim(dynamo_shim: Snippet) -> Snippet:
    """Run a program after WORKER."""
    return lambda program: dynamo_shim(WORKER + program)


def test_gradients_count_writes_when_an_output_is_a_view_of_another(
    worker_shim: Snippet,
) -> None:
    worker_shim("""
cases = {
    "slice": lambda x, w: (lambda h: (h, h[:, :2]))(x @ w),
    "whole": lambda x, w: (lambda h: (h, h.view(-1)))(x @ w),
    "nested": lambda x, w: (lambda h: (h[:1][:, :2], h[:1], h))(x @ w),
}
compared(cases, [scaled_first, scaled_last], on_worker=True)
""")


def test_gradients_count_writes_when_outputs_are_views_of_what_is_no_output(
    worker_shim: Snippet,
) -> None:
    worker_shim("""
cases = {
    "overlapping": lambda x, w: (lambda h: (h[:, :3], h[:, 1:]))(x @ w),
    "beside each other": lambda x, w: (lambda h: (h.unsqueeze(0), h[-1]))(x @ w),
    "written": lambda x, w: (lambda h: (h[:, 0], h[:, 1:]))((x @ w).sub_(1).mul_(2)),
}
compared(cases, [scaled_first, scaled_last], on_worker=True)
retyped = lambda x, w: (lambda h: (h, torch.view_as_complex(h.view(2, 2, 2))))(x @ w)
compared({"of another type": retyped}, [scaled_first, scaled_last], on_worker=False)
assert "its outputs share memory while gradients are recorded" in report.counts.local_calls
compared({"split": lambda x, w: (x @ w).chunk(2)}, [lambda *_: None], on_worker=True)
""")


def test_views_are_views_when_nothing_has_a_history(worker_shim: Snippet) -> None:
    worker_shim("""
def forward(x, w):
    h = x @ w
    return h, h[:, :2], h.detach(), x[:1]

called = torch.compile(forward, backend=backend)
x, w = torch.ones(2, 4).cuda(), torch.ones(4, 4).cuda()
with torch.no_grad():
    h, view, *_ = called(x, w)
assert view._base is h and not view.requires_grad
with torch.inference_mode():
    h, view, *_ = called(x, w)
    view.zero_()
assert h[:, 0].sum() == 0
factor = torch.tensor([3.0]).cuda().requires_grad_()
h, view, cut, row = called(x, w)
view.mul_(factor)
h.sum().backward()
row.add_(factor)
x.sum().backward()
assert factor.grad.item() == 16 + 4 and not cut.requires_grad
assert len(answered) == 3
factor.grad = None
halves = torch.compile(lambda x, w: (lambda h: (h[:, :3], h[:, 1:]))(x @ w), backend=backend)
left, right = halves(torch.ones(2, 4).cuda(), w)
left.mul_(factor)
right.sum().backward()
assert factor.grad.item() == 16
""")


def test_gradients_are_answered_when_an_operator_writes_to_what_it_makes(
    worker_shim: Snippet,
) -> None:
    worker_shim("""
def step(cell):
    def forward(x, w):
        state = cell(x @ w)
        hidden = state if isinstance(state, torch.Tensor) else state[1]
        return hidden, hidden.mean(-1)
    return forward

for cell in (torch.nn.GRUCell(4, 4), torch.nn.LSTMCell(4, 4)):
    cell.requires_grad_(False)
    x, w = torch.rand(2, 4).cuda(), torch.rand(4, 4).cuda().requires_grad_()
    hidden, mean = torch.compile(step(cell.cuda()), backend=backend)(x, w)
    assert hidden.requires_grad and mean.requires_grad
assert len(answered) == 2 and not report.counts.local_calls, report.counts.local_calls
""")


def test_graph_that_writes_below_an_output_runs_in_the_function(worker_shim: Snippet) -> None:
    worker_shim("""
def whole(x, w):
    h = x @ w
    view = h.view(-1)
    follows = view.exp()
    h.add_(1)
    return view, follows

def through_detached(x, w):
    h = (x @ w).sigmoid() * 2
    follows = h.sum()
    h.detach().mul_(2)
    return h, follows

cases = {"whole": whole, "detached": through_detached}
compared(cases, [lambda *_: None], on_worker=False)
""")
