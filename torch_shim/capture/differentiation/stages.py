"""A graph's answer with a history: backward repeats the forward pass in the function.

A program may ask for gradients at an output from which another one follows, as at the activations
that a hook keeps. So outputs that follow from each other have a history of several stages, and each
stage takes the outputs of those before as inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from torch_shim.capture.call_state import CallState
from torch_shim.capture.differentiation.outputs import Outputs, differentiable
from torch_shim.remote.generator_turns import as_state, turns

_NoHandles = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 - the documented way to step aside


class AnsweredGraph(Protocol):
    """A graph, as far as gradients concern it."""

    @property
    def random(self) -> bool:
        """Whether running the graph may draw random numbers."""

    def answer(self, args: Sequence[Any]) -> list[Any]:
        """Run the graph where it is fastest."""

    def run_locally(
        self,
        args: Sequence[Any],
        reason: str,
        given: Mapping[int, Any] | None = None,
        what: str = "",
    ) -> list[Any]:
        """Run the graph in this process, from the outputs that are given on."""

    def note_training(self, root: Any) -> None:
        """Learn that gradients were asked for."""


class _Call:
    """One answered call: what its backward needs besides tensors."""

    def __init__(self, graph: AnsweredGraph, root: Any, outputs: Outputs) -> None:
        self.graph = graph
        self.root = root
        self.outputs = outputs
        self.random_state = torch.default_generator.get_state() if graph.random else None
        self.state = CallState()


def answer_in_stages(
    graph: AnsweredGraph, root: Any, outputs: Outputs, args: Sequence[Any]
) -> list[Any]:
    """Run the forward pass on a worker; gradients come from this process if they are asked for."""
    call = _Call(graph, root, outputs)
    if torch.is_grad_enabled():
        return _answered(call, args)
    with torch.inference_mode(mode=False):  # gradients are recorded inside of the program
        return _answered(call, args)


def _answered(call: _Call, args: Sequence[Any]) -> list[Any]:
    outputs = call.outputs
    turns.forget_sent()
    with torch.no_grad():
        values = call.graph.answer(args)
    if turns.sent is not None:
        call.random_state = as_state(turns.sent)
    done: list[int] = []
    for positions in outputs.stages:
        before = [position for position in done if outputs.differentiable[position]]
        given = [values[position] for position in before]
        answers = [values[position] for position in positions]
        results = _Stage.apply(call, positions, before, answers, *args, *given)
        for position, result in zip(positions, results, strict=True):
            values[position] = result
        outputs.make_views(values, positions, args)
        done += positions
    return values


def run_with_given(
    module: fx.GraphModule, args: Sequence[Any], given: Mapping[int, Any]
) -> list[Any]:
    """Run a graph; what follows from outputs that are given is computed from those."""
    if not given:
        return list(module.forward(*args))
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    values = {output.args[0][position]: value for position, value in given.items()}
    return list(_FromGiven(module, values).run(*args))


class _FromGiven(fx.Interpreter):
    """Runs every node, and takes the values of some from elsewhere."""

    def __init__(self, module: fx.GraphModule, values: Mapping[fx.Node, Any]) -> None:
        super().__init__(module)
        self._values = values

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, as random numbers are drawn in order; its value may be a given one."""
        value = super().run_node(n)
        return self._values.get(n, value)


class _Stage(torch.autograd.Function):
    """Some outputs of an answered call, which follow from its inputs and from other outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        positions: Sequence[int],
        before: Sequence[int],
        answers: Sequence[Any],
        *args: Any,
    ) -> tuple[Any, ...]:
        ctx.call, ctx.positions, ctx.before = call, positions, before
        ctx.tensors = [isinstance(value, torch.Tensor) for value in args]
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in args]
        ctx.save_for_backward(*(value for value in args if isinstance(value, torch.Tensor)))
        fixed = [
            value
            for value, position in zip(answers, positions, strict=True)
            if isinstance(value, torch.Tensor) and not call.outputs.differentiable[position]
        ]
        ctx.mark_non_differentiable(*fixed)
        return tuple(answers)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        call: _Call = ctx.call
        call.graph.note_training(call.root)
        again = torch.is_grad_enabled()  # the caller needs gradients of these gradients
        with _NoHandles(), call.state.restored():
            with torch.enable_grad():
                values = _inputs_again(ctx, detached=not again)
            outputs = _with_state(call.random_state, lambda: _outputs_again(ctx, values))
            wanted = [value for value in values if differentiable(value)]
            pairs = [
                (outputs[position], gradient)
                for position, gradient in zip(ctx.positions, gradients, strict=True)
                if gradient is not None and differentiable(outputs[position])
            ]
            found = iter(
                torch.autograd.grad(
                    [output for output, _ in pairs],
                    wanted,
                    [gradient for _, gradient in pairs],
                    allow_unused=True,
                    create_graph=again,
                )
                if pairs
                else [None] * len(wanted)
            )
        given = (next(found) if differentiable(value) else None for value in values)
        return (None, None, None, None, *given)


_FIRST_TENSOR = 4  # of the arguments of `_Stage.forward`, `ctx` not counted


def _inputs_again(ctx: Any, *, detached: bool) -> list[Any]:
    saved = iter(ctx.saved_tensors)
    args: list[Any] = []
    for position, tensor in enumerate(ctx.tensors):
        value = next(saved) if tensor else ctx.others[position]
        if tensor and detached:
            needed = ctx.needs_input_grad[position + _FIRST_TENSOR]
            value = value.detach().requires_grad_(needed)
        elif tensor and value.requires_grad:
            # One input may follow from another: gradients stop at what is an input itself.
            value = value.view_as(value)
        args.append(value)
    return args


def _outputs_again(ctx: Any, values: Sequence[Any]) -> list[Any]:
    count = len(values) - len(ctx.before)
    given = dict(zip(ctx.before, values[count:], strict=True))
    call: _Call = ctx.call
    what = f"the backward pass of {call.root.name}"
    return call.graph.run_locally(values[:count], "backward", given, what)


def _with_state(state: torch.Tensor | None, run: Callable[[], list[Any]]) -> list[Any]:
    """Run with the forward pass's generator state, and restore the current state afterwards."""
    if state is None:
        return run()
    with turns.alone():
        now = torch.default_generator.get_state()
        torch.default_generator.set_state(state)
        try:
            return run()
        finally:
            torch.default_generator.set_state(now)
