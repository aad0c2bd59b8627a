"""What `gpufaas check` finds by reading a source file."""

import ast
import textwrap

import pytest

from gpufaas.check.findings import UseOutcome
from gpufaas.check.torch_uses import uses_in
from tests.kit.outcomes import outcome

REDIRECTED, LOCAL, CANNOT = UseOutcome.REDIRECTED, UseOutcome.LOCAL, UseOutcome.CANNOT


def uses(source: str) -> list[tuple[int, str, UseOutcome]]:
    """Line, text and outcome of each use."""
    tree = ast.parse(textwrap.dedent(source))
    return [(use.line, use.what, use.rule.outcome) for use in uses_in("app.py", tree)]


REDIRECTED_CALLS = (
    "model.cuda()",
    "model.cuda(0)",
    "model.to('cuda')",
    "model.to(device)",
    "model.to(other.device)",
    "model.to(device='cuda:0')",
    "model.to('cuda' if fast else 'cpu')",
    "model.to(name or 'cuda')",
    "model.to(f'cuda:{rank}')",
    "torch.zeros(3, device='cuda')",
    "torch.load(file, map_location='cuda')",
    "torch.device('cuda')",
    "torch.device('cuda', 0)",
    "torch.autocast('cuda')",
    "torch.Generator(device='cuda')",
    "torch.set_default_device('cuda')",
    "pipeline('text-generation', device=0)",
    "load(name, device_map='auto')",
    "load(name, device_map={'': 0})",
)


def test_use_is_redirected_when_a_call_names_the_gpu() -> None:
    wrong = [
        (line, found)
        for line in REDIRECTED_CALLS
        if (found := outcome(uses, f"import torch\n{line}")) != [(2, line, REDIRECTED)]
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "line",
    [
        "model.cuda(1)",
        "model.to('cuda:1')",
        "model.to(1)",
        "torch.zeros(3, device='cuda:3')",
        "torch.device('cuda', 1)",
        "torch.cuda.set_device(2)",
        "nn.DataParallel(model, device_ids=[0, 1])",
        "places = ['cuda:0', 'cuda:1']",
    ],
)
def test_use_cannot_be_done_when_it_names_a_second_gpu(line: str) -> None:
    found = uses(f"import torch\nfrom torch import nn\n{line}")

    assert [(number, outcome) for number, _, outcome in found] == [(3, CANNOT)]


LINES_WITHOUT_GPU = (
    "model.to('cpu')",
    "model.to(torch.float16)",
    "model.cpu()",
    "torch.zeros(3, device='cpu')",
    "torch.load(file, map_location='cpu')",
    "torch.Generator()",
    "pipeline('text-generation', device=-1)",
    "load(name, device_map=None)",
    "print('cuda')",
    "name == 'cuda'",
    "torch.nn.Linear(2, 2)",
    "x: torch.cuda.FloatTensor",
    "def f(x: torch.cuda.FloatTensor) -> torch.cuda.FloatTensor: pass",
)


def test_line_is_passed_over_when_it_names_no_gpu() -> None:
    wrong = [
        (line, found)
        for line in LINES_WITHOUT_GPU
        if (found := outcome(uses, f"import torch\n{line}")) != []
    ]
    assert wrong == []


def test_name_stands_for_the_gpu_when_it_was_given_one() -> None:
    source = """
        import torch
        where = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
        here = where
        model.to(here)
    """

    assert (5, "model.to(here)", REDIRECTED) in uses(source)


def test_device_is_the_cpu_when_the_file_names_it() -> None:
    assert uses("device = 'cpu'\nmodel.to(device)") == []


def test_parameter_names_the_gpu_when_that_is_its_default() -> None:
    assert uses("def f(model, place='cuda'):\n    model.to(place)") == [
        (2, "model.to(place)", REDIRECTED)
    ]


@pytest.mark.parametrize(
    ("imported", "name"),
    [
        ("import torch", "torch.cuda.CUDAGraph()"),
        ("import torch as t", "t.cuda.CUDAGraph()"),
        ("import torch.cuda", "torch.cuda.CUDAGraph()"),
        ("import torch.cuda as c", "c.CUDAGraph()"),
        ("from torch import cuda", "cuda.CUDAGraph()"),
        ("from torch.cuda import CUDAGraph", "CUDAGraph()"),
        ("from torch.cuda import CUDAGraph as Recorded", "Recorded()"),
        ("def late():\n    import torch as t", "t.cuda.CUDAGraph()"),
    ],
)
def test_name_is_known_however_it_is_imported(imported: str, name: str) -> None:
    last = imported.count("\n") + 2

    assert uses(f"{imported}\n{name}") == [(last, "torch.cuda.CUDAGraph", CANNOT)]


def test_name_means_nothing_when_it_was_not_imported() -> None:
    assert uses("torch = load()\ntorch.cuda.CUDAGraph()") == []


OUTCOMES = (
    ("torch.cuda.is_available()", LOCAL, False),
    ("torch.cuda.memory_allocated()", LOCAL, False),
    ("torch.backends.cudnn.benchmark = True", REDIRECTED, False),
    ("torch.backends.cudnn.enabled = False", LOCAL, False),
    ("torch.distributed.is_available()", LOCAL, False),
    ("torch.jit.script(model)", LOCAL, True),
    ("torch.compiler.disable(model)", LOCAL, True),
    ("loss.backward()", LOCAL, True),
    ("torch.compile(model)", REDIRECTED, False),
    ("torch.nn.DataParallel(model)", REDIRECTED, False),
    ("torch.cuda.amp.autocast()", REDIRECTED, False),
    ("torch.distributed.init_process_group('nccl')", LOCAL, False),
    ("torch.utils.cpp_extension.load(name, files)", CANNOT, False),
    ("torch.cuda.something_new()", CANNOT, False),
    ("torch.cuda.Event(enable_timing=True)", LOCAL, False),
    ("torch.cuda.Event(interprocess=False)", LOCAL, False),
    ("torch.cuda.Event(interprocess=True)", CANNOT, False),
)


def test_names_have_the_outcomes_of_the_table() -> None:
    def rules(line: str) -> list[tuple[int, UseOutcome, bool]]:
        tree = ast.parse(f"import torch\n{line}")
        return [(use.line, use.rule.outcome, use.rule.heavy) for use in uses_in("app.py", tree)]

    wrong = [
        (line, found)
        for line, wanted, heavy in OUTCOMES
        if (found := outcome(rules, line)) != [(2, wanted, heavy)]
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "line",
    [
        "import cupy",
        "import cupy.linalg as la",
        "from cupy import linalg",
        "import triton.language as tl",
        "from numba import cuda",
        "import numba.cuda",
        "import pynvml",
    ],
)
def test_package_is_reported_once_where_it_is_imported(line: str) -> None:
    found = uses(f"{line}\nla.norm(1)\ncuda.jit(f)")

    assert [(number, outcome) for number, _, outcome in found] == [(1, CANNOT)]


def test_package_is_passed_over_when_the_program_can_go_without() -> None:
    source = """
        from typing import TYPE_CHECKING
        try:
            import flash_attn
        except ImportError:
            flash_attn = None
        if TYPE_CHECKING:
            import cupy
    """

    assert uses(source) == []


def test_package_is_reported_when_the_try_is_about_something_else() -> None:
    assert [line for line, _, _ in uses("try:\n    import cupy\nexcept KeyError:\n    pass")] == [2]


def test_long_call_is_shown_by_its_method() -> None:
    (use,) = uses("Model(size=12, layers=4, width=256, heads=8).half().to('cuda')")

    assert use == (1, ".to('cuda')", REDIRECTED)
