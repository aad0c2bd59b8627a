"""Loops, branches, NumPy and attributes in a graph become programs that compute the same."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._higher_order_ops import associative_scan as associative_scans
from torch._higher_order_ops import map as maps
from torch._higher_order_ops import scan as scans
from torch._higher_order_ops import while_loop as while_loops
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from gpu_manager.call_errors import CallRefused
from gpu_manager.worker.calls.call import leave_modes
from gpu_manager.worker.program.allowed_operators import OperatorTable
from gpu_manager.worker.program.build import BuiltProgram
from tests.kit.worlds.caller import program, step
from torch_shim.capture.encode import NotShippable, encode
from torch_shim.wire.programs import PartName, Program, ProgramPart, Ref, Tuple, unpack

TABLE = OperatorTable(torch.device("cpu"))
BIAS = torch.arange(12.0).reshape(3, 4)

# Torch gives these no types, or types that are too narrow.
associative_scan: Any = associative_scans
map_rows: Any = maps
scan: Any = scans
while_loop: Any = while_loops

Computes = Callable[[torch.Tensor], Any]


def _nested(x: torch.Tensor) -> Any:
    return torch.cond(
        x.sum() > 0,
        lambda x: torch.cond(x.mean() > 1, lambda x: x * 2, lambda x: x - 1, (x,)),
        lambda x: x + torch.ones(4, device=x.device),
        (x,),
    )


def _attention(x: torch.Tensor) -> Any:
    heads = x.reshape(1, 1, 3, 4)
    return flex_attention(heads, heads, heads, score_mod=lambda s, _b, _h, i, j: s + BIAS[i, j])


COMPUTES: dict[str, Computes] = {
    "cond": lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,)),
    "cond_nested": _nested,
    "while_loop": lambda x: while_loop(
        lambda n, _: n < 3, lambda n, y: (n + 1, y * 2), (torch.tensor(0), x)
    ),
    "while_loop_of_no_turn": lambda x: while_loop(
        lambda n, _: n < 0, lambda n, y: (n + 1, y * 2), (torch.tensor(0), x)
    ),
    "scan": lambda x: scan(lambda c, row: (c * 0.5 + row, c - row), torch.zeros(4), x, dim=0),
    "associative_scan": lambda x: associative_scan(
        lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (x, x + 1), dim=0, combine_mode="generic"
    ),
    "map": lambda x: map_rows(lambda row, other: row.sin() @ other, x, x.mT.contiguous()),
    "checkpoint": lambda x: checkpoint(
        lambda y: checkpoint(lambda z: z.relu() * 2, y, use_reentrant=False), x, use_reentrant=False
    ),
    "region": lambda x: _region(_region(x)),
    "flex_attention": _attention,
    "numpy_constants": lambda x: x / np.sqrt(8) * np.float32(0.5) + np.float64(1.5),
    "numpy_tables": lambda x: x + torch.from_numpy(np.log(np.arange(1, 5))).to(x.dtype),
    "numpy_of_tensors": lambda x: torch.from_numpy(np.tanh(x.numpy()) + np.ones(4)),
    "real_and_imaginary": lambda x: (torch.fft.fft(x).real, torch.fft.fft(x).imag),
    "attributes": lambda x: (x.T, x.mT, x.data * 2),
}


@torch.compiler.nested_compile_region
def _region(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = x.sigmoid() + x
    return found


def _captured(
    compute: Computes, given: torch.Tensor, **options: Any
) -> tuple[torch.fx.GraphModule, tuple[Any, ...], Any]:
    """The one graph that Dynamo makes, its arguments, and its own answer."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            graphs.append((graph, arguments, graph(*arguments)))
            return graphs[-1][2]

        return run

    torch.compiler.reset()
    with torch.set_grad_enabled(given.requires_grad):
        torch.compile(compute, backend=backend, fullgraph=True, **options)(given)
    (captured,) = graphs
    return captured  # type: ignore[no-any-return] # a triple


def _computes_the_same(graph: torch.fx.GraphModule, arguments: Any, expected: Any) -> Program:
    sent = unpack(encode(graph).pack())
    built = BuiltProgram("d", sent, TABLE)
    inputs = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
    with torch.no_grad():
        found = built.run(inputs, built.constants)
    leave_modes()
    torch.testing.assert_close(list(found), list(expected), rtol=0, atol=0)
    return sent


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("name", COMPUTES)
@pytest.mark.parametrize("sign", [1, -1])
def test_captured_graph_computes_the_same_as_a_program(name: str, sign: int) -> None:
    torch.manual_seed(0)
    _computes_the_same(*_captured(COMPUTES[name], sign * torch.rand(3, 4)))


def test_numpy_of_constants_is_computed_before_the_program_runs() -> None:
    sent = _computes_the_same(*_captured(COMPUTES["numpy_constants"], torch.rand(3, 4)))
    assert not any(called.operator.startswith("n:") for called in sent.steps)
    assert len(sent.constants) == 3


def test_numpy_of_a_changing_size_is_computed_by_the_program() -> None:
    captured = _captured(lambda x: x / np.sqrt(x.shape[0]), torch.rand(3, 4), dynamic=True)
    sent = _computes_the_same(*captured)
    assert any(called.operator == "n:sqrt" for called in sent.steps)


def test_mathematics_of_a_changing_size_is_computed_by_the_program() -> None:
    captured = _captured(lambda x: x * math.acos(1 / x.shape[0]), torch.rand(3, 4), dynamic=True)
    sent = _computes_the_same(*captured)
    assert any(called.operator == "t:torch._sym_acos" for called in sent.steps)


def test_numpy_that_draws_is_no_constant() -> None:
    def draw(x: torch.Tensor) -> torch.Tensor:
        drawn: torch.Tensor = x * torch.from_numpy(np.random.rand(3, 4))
        return drawn

    graph, _, _ = _captured(draw, torch.rand(3, 4))
    with pytest.raises(NotShippable, match="wrapped_rand"):
        encode(graph)


class _Scaled(torch.autograd.Function):
    """A function with gradients of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        return x.sin() * 2, x.cos()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        found: torch.Tensor = gradients[0] * x.cos() * 2 - gradients[1] * x.sin()
        return found


@pytest.mark.filterwarnings(  # older Dynamo makes an instance itself
    "ignore:<class 'torch.autograd.function.Function'> should not be inst:DeprecationWarning"
)
@pytest.mark.parametrize(
    "compute",
    [_Scaled.apply, lambda x: checkpoint(lambda y: y.sin() * y, x, use_reentrant=False)],
)
def test_forward_runs_without_parts_when_only_gradients_make_a_graph_of_it(
    compute: Computes,
) -> None:
    captured = _captured(compute, torch.rand(3, 4, requires_grad=True))
    assert not _computes_the_same(*captured).parts


def _part(*steps: Any, output: Any, inputs: int = 1) -> ProgramPart:
    return ProgramPart(inputs, steps, output)


def _build(what: Program) -> BuiltProgram:
    return BuiltProgram("d", unpack(what.pack()), TABLE)


SAME = _part(output=Tuple([Ref(0)]))


@pytest.mark.parametrize(
    ("called", "parts"),
    [
        (step("h:cond", True, PartName(1), PartName(0), Tuple([Ref(0)])), [SAME]),
        (step("h:cond", True, PartName(-1), PartName(0), Tuple([Ref(0)])), [SAME]),
        (step("h:cond", True, PartName(True), PartName(0), Tuple([Ref(0)])), [SAME]),
        (step("b:max", [Ref(0)], key=PartName(0)), [SAME]),
        (step("o:is_", PartName(0), None), [SAME]),
        (step("h:run", PartName(0), Ref(0)), [SAME]),
        (step("m:add", Ref(0), 1), [_part(step("m:numpy", Ref(0)), output=Ref(1))]),
        (step("m:add", Ref(0), 1), [_part(output=Ref(1))]),
        (step("m:add", Ref(0), 1), [_part(output=PartName(0))]),
        (
            step("m:add", Ref(0), 1),
            [_part(step("h:cond", True, PartName(0), PartName(0), Tuple([])), output=Ref(1))],
        ),
    ],
)
def test_program_is_refused_when_it_misuses_parts(called: Any, parts: list[ProgramPart]) -> None:
    with pytest.raises(CallRefused) as refused:
        _build(program(called, output=[Ref(1)], parts=tuple(parts)))
    assert refused.value.failure == "program refused"


def _tower(height: int) -> tuple[ProgramPart, ...]:
    floors = [SAME]
    for number in range(height - 1):
        below = PartName(number)
        called = step("h:cond", True, below, below, Tuple([Ref(0)]))
        floors.append(_part(called, output=Ref(1)))
    return tuple(floors)


def test_program_is_refused_when_its_parts_are_nested_too_deep() -> None:
    most = _build(program(step("m:add", Ref(0), 1), output=[Ref(1)], parts=_tower(16)))
    assert len(most.source.steps) == 1
    with pytest.raises(CallRefused, match="17 deep"):
        _build(program(step("m:add", Ref(0), 1), output=[Ref(1)], parts=_tower(17)))


def test_loop_fails_when_it_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_manager.worker.program.replacements._MOST_TURNS", 10)
    called = step("h:while_loop", PartName(0), PartName(1), Tuple([Ref(0)]), Tuple([]))
    endless = _build(program(called, output=[Ref(1)], parts=(_part(output=True), SAME)))
    with pytest.raises(RuntimeError, match="10 turns"):
        endless.run([torch.ones(1)], [])


def test_loop_over_too_many_rows_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_manager.worker.program.replacements._MOST_TURNS", 10)
    called = step("h:map_impl", PartName(0), [Ref(0)], [])
    built = _build(program(called, output=[Ref(1)], parts=(SAME,)))
    with pytest.raises(RuntimeError, match="10 turns"):
        built.run([torch.ones(11, 2)], [])


def test_loop_over_no_rows_fails() -> None:
    called = step("h:map_impl", PartName(0), [Ref(0)], [])
    built = _build(program(called, output=[Ref(1)], parts=(SAME,)))
    with pytest.raises(ValueError, match="no rows"):
        built.run([torch.ones(0, 2)], [])
