"""Graphs that a worker cannot run, or that hold graphs themselves, run in the function."""

import pytest

from tests.kit.programs.snippets import Snippet

GRAPH = """
from torch_shim.capture.dynamo import configure
from torch_shim.capture.graphs import Graph
from torch_shim.capture.roots import Roots, root_of_inputs
from torch_shim.errors import RemoteFailure
from torch_shim.process_report import report
from torch_shim.wire.protocol import FailureKind

configure()
asked = []
made = []

class Worker:
    random = False

    def run(self, args, *_):
        asked.append(len(args))
        raise RemoteFailure(FailureKind.{failure}, "not this", {{}})

def backend(module, examples):
    graph = Graph(module, examples, Roots("unix:/nowhere", ""))
    graph._loose = root_of_inputs(())
    graph._remote = Worker()
    made.append(graph)
    return graph
"""


@pytest.mark.parametrize("failure", ["OPERATOR", "PROGRAM", "INTERNAL"])
def test_worker_is_not_asked_again_when_a_graph_failed_there_alone(
    dynamo_shim: Snippet, failure: str
) -> None:
    dynamo_shim(
        GRAPH.format(failure=failure)
        + """
called = torch.compile(lambda x: x.sin() * 2, backend=backend)
x = torch.arange(3.0).cuda()
with torch.no_grad():
    answers = [called(x) for _ in range(3)]
assert asked == [1], asked
assert all(torch.equal(answer.cpu(), x.cpu().sin() * 2) for answer in answers)
((reason, calls),) = report.counts.local_calls.items()
assert calls == 3
assert "not this" in reason
"""
    )


def test_worker_is_asked_again_when_the_graph_fails_in_the_function_too(
    dynamo_shim: Snippet,
) -> None:
    dynamo_shim(
        GRAPH.format(failure="OPERATOR")
        + """
called = torch.compile(lambda x, i: x[i], backend=backend)
x, beyond = torch.arange(3.0).cuda(), torch.tensor([7]).cuda()
for _ in range(2):
    try:
        called(x, beyond)
    except IndexError:
        continue
    raise AssertionError("an index beyond the tensor was taken")
assert asked == [2, 2], asked
"""
    )


@pytest.mark.parametrize(
    ("failure", "status"),
    [("LOST", 503), ("CANCELLED", 503), ("QUEUE_FULL", 429), ("EXPIRED", 503)],
)
def test_error_says_when_the_call_may_be_made_again(
    dynamo_shim: Snippet, failure: str, status: int | None
) -> None:
    dynamo_shim(
        GRAPH.format(failure=failure)
        + f"""
called = torch.compile(lambda x: x.sin() * 2, backend=backend)
try:
    with torch.no_grad():
        called(torch.arange(3.0).cuda())
except RuntimeError as error:
    assert str(error).startswith("CUDA error: "), error
    assert getattr(error, "answer_status", None) == {status}, error
else:
    raise AssertionError("it computed")
"""
    )


def test_branch_that_names_the_gpu_runs_when_its_graph_does_not_go_to_a_worker(
    dynamo_shim: Snippet,
) -> None:
    dynamo_shim(
        GRAPH.format(failure="PROGRAM")
        + """
def choose(x):
    return torch.cond(
        x.sum() > 0,
        lambda x: x.to("cuda") + torch.ones(3, device="cuda"),
        lambda x: torch.cond(x.mean() < -1, lambda x: x.cuda() * 2, lambda x: x.cos(), (x,)),
        (x,),
    )

called = torch.compile(choose, backend=backend, fullgraph=True)
x = torch.tensor([1.0, 2.0, 3.0])
for sign in (1, -1):
    with torch.no_grad():
        found = called((sign * x).cuda())
    assert found.is_cuda
    assert torch.equal(found.cpu(), x + 1 if sign > 0 else x * -2)
"""
    )


def test_gradient_at_an_output_counts_what_follows_from_it(dynamo_shim: Snippet) -> None:
    dynamo_shim(
        GRAPH.format(failure="OPERATOR")
        + """
def forward(x):
    h = x * 2
    return h, h * h, h.detach()

called = torch.compile(forward, backend=backend)
x = torch.arange(3.0).cuda().requires_grad_()
h, square, cut = called(x)
assert h.is_cuda and square.requires_grad and not cut.requires_grad
(at_h,) = torch.autograd.grad(square.sum() + h.sum(), h, retain_graph=True)
assert torch.equal(at_h.cpu(), 2 * h.detach().cpu() + 1)
(at_x,) = torch.autograd.grad(square.sum(), x, create_graph=True)
assert torch.equal(at_x.detach().cpu(), 8 * x.detach().cpu())
(twice,) = torch.autograd.grad(at_x.sum(), x)
assert torch.equal(twice.cpu(), torch.full((3,), 8.0))
"""
    )


def test_gradient_is_right_when_a_graph_writes_to_an_output(dynamo_shim: Snippet) -> None:
    dynamo_shim(
        GRAPH.format(failure="OPERATOR")
        + """
def forward(x):
    h = x * 2
    h.add_(1)
    return h, h * h

called = torch.compile(forward, backend=backend)
x = torch.arange(3.0).cuda().requires_grad_()
h, square = called(x)
(at_h,) = torch.autograd.grad(square.sum(), h)
assert torch.equal(at_h.cpu(), 2 * h.detach().cpu())
assert not asked, "it runs in the function"
"""
    )


def test_gradient_is_counted_once_when_one_input_follows_from_another(
    dynamo_shim: Snippet,
) -> None:
    dynamo_shim(
        GRAPH.format(failure="OPERATOR")
        + """
import warnings
warnings.simplefilter("ignore")  # Dynamo reads .grad of inputs, and torch warns of that
called = torch.compile(lambda a, b: a * b, backend=backend)
x = torch.arange(3.0).cuda().requires_grad_()
(at_x,) = torch.autograd.grad(called(x, x * 3).sum(), x, create_graph=True)
assert torch.equal(at_x.detach().cpu(), 6 * x.detach().cpu())
(twice,) = torch.autograd.grad(at_x.sum(), x)
assert torch.equal(twice.cpu(), torch.full((3,), 6.0))
"""
    )


def test_compiled_function_has_a_model_when_it_has_no_weights(dynamo_shim: Snippet) -> None:
    dynamo_shim(
        """
from torch_shim.capture.roots import root_of_inputs

roots = [root_of_inputs((torch.ones(2, device="cuda"), 3)) for _ in range(2)]
first, second = ([*root.tensors()] for root in roots)
assert len(first) == len(second) == 1 and first[0].is_cuda and torch.equal(first[0], second[0])
weight = torch.nn.Parameter(torch.ones(2)).cuda()
weight = torch.nn.Parameter(weight)
assert [*root_of_inputs((weight,)).tensors()][0] is weight
"""
    )


def test_program_says_at_its_end_that_it_calls_no_module(tracing_shim: Snippet) -> None:
    tracing_shim("""
import torch
from torch_shim.process_report import report

matrix = torch.ones(2, 2, device="cuda")
matrix = matrix @ matrix
report._tell_of_no_module()
report._tell_of_no_module()
assert [*report.counts.local_calls] == ["no module and no function under torch.compile is called"]
assert report.as_json()
""")
