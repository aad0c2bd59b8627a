"""Where a graph ends although Dynamo could go on."""

import pytest

from tests.kit.programs.snippets import Snippet

COUNTED = """
from torch_shim.capture.dynamo import configure
from torch_shim.capture.traces.dynamo_settings import for_gpu

configure()
seen = []

def backend(module, examples):
    seen.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
    return module.forward

for_gpu(backend)
x = torch.ones(3)
"""
OWN_OPERATOR = (
    COUNTED
    + """
@torch.library.custom_op("tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2

halved.register_fake(lambda x: torch.empty_like(x))

def forward(x):
    return torch.ops.tests.halved(x.sin()) + 1
"""
)


def test_operator_of_a_program_ends_a_graph_when_it_takes_gpu_tensors(dynamo_shim: Snippet) -> None:
    dynamo_shim(
        OWN_OPERATOR
        + """
called = torch.compile(forward, backend=backend)
found = called(x.cuda())
assert found.is_cuda and torch.equal(found.cpu(), forward(x))
assert len(seen) == 2 and not any("halved" in name for names in seen for name in names), seen
"""
    )


def test_operator_of_a_program_stays_in_its_graph_when_the_user_wants_one_graph(
    dynamo_shim: Snippet,
) -> None:
    dynamo_shim(
        OWN_OPERATOR
        + """
torch.compile(forward, backend=backend, fullgraph=True)(x.cuda())
(names,) = seen
assert any("halved" in name for name in names), names
"""
    )


@pytest.mark.parametrize(
    "draw",
    [
        "x * random.sample(range(100), 1)[0]",
        "x + sum(shuffled()[:2])",
        "x * torch.from_numpy(numpy.random.randn(3)).to(x)",
    ],
)
def test_numbers_are_those_of_the_seed_when_forward_draws_them_by_other_means(
    dynamo_shim: Snippet, draw: str
) -> None:
    dynamo_shim(
        COUNTED
        + f"""
import random
import numpy

def shuffled():
    numbers = list(range(100))
    random.shuffle(numbers)
    return numbers

def forward(x):
    return {draw}

def three(called, x):
    random.seed(0)
    numpy.random.seed(0)
    return torch.stack([called(x).cpu() for _ in range(3)])

expected = three(forward, x)
assert not torch.equal(expected[0], expected[1])
assert torch.equal(three(torch.compile(forward, backend=backend), x.cuda()), expected)
"""
    )


def test_hook_of_a_computed_tensor_notes_what_it_is_to_note(dynamo_shim: Snippet) -> None:
    dynamo_shim(
        COUNTED
        + """
noted = []

def forward(x):
    h = x * 2
    h.register_hook(noted.append)
    return h * h

given = x.cuda().requires_grad_()
torch.compile(forward, backend=backend)(given).sum().backward()
(gradient,) = noted
assert torch.equal(gradient.cpu(), torch.full((3,), 4.0))
assert torch.equal(given.grad.cpu(), torch.full((3,), 8.0))
"""
    )


def test_function_answers_from_its_cache_when_it_was_called_before(dynamo_shim: Snippet) -> None:
    dynamo_shim(
        COUNTED
        + """
import functools
asked = []

@functools.lru_cache
def half(number):
    asked.append(number)
    return number // 2

@functools.cache
def noise(size):
    asked.append(size)
    return torch.randn(size).cuda()

def forward(x, way):
    return x.sin() + way(3)

for way in (half, noise):
    expected = forward(x.cuda(), way)
    called = torch.compile(forward, backend=backend)
    for _ in range(2):
        assert torch.equal(called(x.cuda(), way), expected)
assert asked == [3, 3], asked
assert len(seen) == 3, seen  # one for the number, two around the tensor
"""
    )


def test_cached_function_raises_its_error_when_it_is_called_in_a_forward(
    dynamo_shim: Snippet,
) -> None:
    dynamo_shim(
        COUNTED
        + """
import functools

@functools.cache
def refused(size):
    raise LookupError(size)

def forward(x):
    return x.sin() + refused(3)

try:
    torch.compile(forward, backend=backend)(x.cuda())
    raise AssertionError("no error")
except LookupError as error:
    assert error.args == (3,)
"""
    )


def test_distributions_of_modules_check_arguments_until_the_program_itself_compiles(
    tracing_shim: Snippet,
) -> None:
    tracing_shim("""
from torch.distributions import Distribution, Normal
from torch_shim.process_report import report

class Checked(torch.nn.Linear):
    def forward(self, x):
        return Normal(super().forward(x), x).log_prob(x)

class Unchecked(torch.nn.Linear):
    def forward(self, x):
        return Normal(super().forward(x), x).log_prob(x)

def is_refused(model, x):
    try:
        model(x)
    except ValueError as error:
        assert "scale" in str(error), error
        return True
    return False

def graphs_of(model):
    before = report.counts.graphs
    checks = Distribution._validate_args
    assert is_refused(model, -x) == is_refused(model, x * float("nan")) == checks
    assert not is_refused(model, x)
    return report.counts.graphs - before

x = torch.ones(2).cuda()
checked, unchecked = Checked(2, 2).cuda(), Unchecked(2, 2).cuda()
with torch.no_grad():
    assert graphs_of(checked) > 1
    assert Distribution._validate_args
    torch.compile(lambda x: x + 1, backend="eager")
    assert not Distribution._validate_args
    assert graphs_of(unchecked) == 1
    graphs_of(checked)
    Distribution.set_default_validate_args(True)
    torch.compile(lambda x: x - 1, backend="eager")
    assert Distribution._validate_args
    graphs_of(checked)
    graphs_of(unchecked)
""")


def test_methods_of_handles_are_not_traced_when_function_modes_see_them(
    dynamo_shim: Snippet,
) -> None:
    dynamo_shim("""
from torch_shim.capture import dynamo
from torch_shim.patching import original_of
from torch_shim.tensors.handles import CudaTensor

skipped = []
dynamo.skip_code = skipped.append
dynamo.skip_own_frames()
for name in ("numpy", "__repr__", "untyped_storage"):
    assert original_of(getattr(CudaTensor, name)).__code__ in skipped, name
""")
