"""A captured graph: run by the worker that has its weights, or by the function's process."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torch_shim.capture.call_state import CallState
from torch_shim.capture.dynamo import on_gpu
from torch_shim.capture.encode import NotShippable, argument, encode
from torch_shim.capture.local_run import on_this_processor
from torch_shim.capture.root_modules import Root, Roots, root_of_inputs
from torch_shim.errors import BadFrame, NoWeights, RemoteFailure
from torch_shim.leases import request_context
from torch_shim.process_report import report
from torch_shim.remote.remote_program import RemoteProgram
from torch_shim.tensors import write_epochs
from torch_shim.tensors.handles import CudaTensor, become_cuda
from torch_shim.wire.protocol import FailureKind

log = logging.getLogger("gpufaas")

_NoHandles = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 - the documented way to step aside
# Functions that write to running statistics without a version counter, and the enabling argument.
_UPDATES_STATISTICS = {"batch_norm": "training", "instance_norm": "use_input_stats"}
_NO_MEMORY = frozenset({FailureKind.OUT_OF_MEMORY, FailureKind.TOO_LARGE})
_RUNS_LOCALLY = frozenset({FailureKind.OPERATOR, FailureKind.PROGRAM, FailureKind.INTERNAL})


class Graph:
    """One captured piece of a module, which Dynamo calls in place of the module's own code."""

    def __init__(self, module: fx.GraphModule, examples: Sequence[Any], roots: Roots) -> None:
        self.operators = sum(node.op.startswith("call_") for node in module.graph.nodes)
        # A graph over CPU tensors would run on the CPU without the shim too: it is not counted.
        self._missed = self.operators if any(map(_on_gpu, module.graph.nodes)) else 0
        self._roots = roots
        self._local = on_this_processor(module)
        self._outputs = _describe_outputs(module, examples)
        self._grad = torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in examples
        )
        self._trains = False
        self._writes = _writes_to_inputs(module)
        self._loose: Root | None = None
        self._remote: RemoteProgram | None = None
        self._reason = self._why_local(examples)
        if not self._reason:
            try:
                self._remote = RemoteProgram(encode(module), self.operators)
            except NotShippable as error:
                self._reason = str(error)

    def __call__(self, *args: Any) -> list[Any]:
        """Return the graph's outputs for these inputs."""
        self._roots.about_to_run()
        with _NoHandles():
            if self._remote is None:
                outputs = self.run_locally(args, self._reason)
            elif self._grad:
                outputs = self._with_gradients(args)
            else:
                outputs = self.answer(args)
            for value, (is_gpu, _) in zip(outputs, self._outputs, strict=True):
                if is_gpu and isinstance(value, torch.Tensor):
                    become_cuda(value)
        return outputs

    def answer(self, args: Sequence[Any]) -> list[Any]:
        """Run the graph on a worker if possible, else in this process."""
        assert self._remote is not None
        root = self._root(args)
        try:
            return self._answer(args, root)
        except RemoteFailure as failure:
            if failure.failure == FailureKind.UNKNOWN_MODEL:  # the manager has been restarted
                self._roots.forget(root)
                return self._answer(args, root)
            if failure.failure in _NO_MEMORY:
                raise torch.cuda.OutOfMemoryError(
                    f"CUDA out of memory. {failure.message}"
                ) from failure
            if failure.failure not in _RUNS_LOCALLY:
                raise RuntimeError(f"CUDA error: {failure}") from failure
            if failure.failure == FailureKind.PROGRAM:
                self._reason, self._remote = failure.message, None
            return self.run_locally(args, f"{failure.failure}: {failure.message}"[:200])
        except BadFrame as error:
            return self.run_locally(args, str(error))

    def _answer(self, args: Sequence[Any], root: Root) -> list[Any]:
        assert self._remote is not None
        if not self._roots.has_manager:
            return self.run_locally(args, "no GPU manager was named (GPUFAAS_ADDRESS)")
        try:
            return self._remote.run(args, self._roots.lease_source(root))
        except NoWeights as error:
            return self.run_locally(args, str(error))

    def run_locally(self, args: Sequence[Any], reason: str) -> list[Any]:
        """Run the graph on the function's own processor, and count the call."""
        if self.operators:
            root = self._roots.current
            report.local_call(reason, self._missed, root.name if root else "a compiled function")
        with request_context.timed_locally(reason):
            outputs = list(self._local(*args))
        if self._writes:
            for value in args:
                if isinstance(value, CudaTensor):
                    write_epochs.note_write(value)
        return outputs

    def _root(self, args: Sequence[Any]) -> Root:
        """Return the root that owns the weights: the module being called, else the inputs."""
        current = self._roots.current
        if current is not None:
            return current
        if self._loose is None:
            self._loose = root_of_inputs(args)
        return self._loose

    @property
    def random(self) -> bool:
        """Whether running the graph may draw random numbers."""
        return self._remote is None or self._remote.random

    def differentiable(self) -> list[bool]:
        """Return, for each output, whether gradients flow through it."""
        return [grad for _, grad in self._outputs]

    def _with_gradients(self, args: Sequence[Any]) -> list[Any]:
        """Run the forward pass on a worker; this process computes gradients if they are needed."""
        if self._writes:
            return self.run_locally(args, "it writes to its inputs while gradients are recorded")
        if self._trains:
            return self.run_locally(args, "gradients are asked for: training runs locally")
        return list(_RemoteForward.apply(self, *args))

    def note_training(self) -> None:
        """Run later calls locally: computing gradients repeats a remote forward pass here."""
        self._trains = True

    def _why_local(self, examples: Sequence[Any]) -> str:
        tensors = [value for value in examples if isinstance(value, torch.Tensor)]
        if not self.operators:
            return "nothing to compute"
        if not self._missed and not any(isinstance(value, CudaTensor) for value in tensors):
            return "only CPU tensors"
        odd = next((value for value in tensors if value.layout is not torch.strided), None)
        if odd is not None:
            return f"layout {odd.layout}"
        return ""


class _RemoteForward(torch.autograd.Function):
    """A remote forward pass; backward repeats the forward pass locally, with gradients."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, *args: Any) -> tuple[Any, ...]:
        ctx.graph = graph
        ctx.tensors = [isinstance(value, torch.Tensor) for value in args]
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in args]
        ctx.rng = torch.default_generator.get_state() if graph.random else None
        ctx.state = CallState()
        ctx.save_for_backward(*(value for value in args if isinstance(value, torch.Tensor)))
        outputs = graph.answer(args)
        fixed = [
            value
            for value, grad in zip(outputs, graph.differentiable(), strict=True)
            if isinstance(value, torch.Tensor) and not grad
        ]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        graph: Graph = ctx.graph
        graph.note_training()
        again = torch.is_grad_enabled()  # the caller needs gradients of these gradients
        with _NoHandles(), ctx.state.restored(), torch.enable_grad():
            args = _inputs_again(ctx, detached=not again)
            outputs = _with_state(ctx.rng, lambda: graph.run_locally(args, "backward"))
            wanted = [value for value in args if _differentiable(value)]
            pairs = [
                (output, gradient)
                for output, gradient in zip(outputs, gradients, strict=True)
                if gradient is not None and _differentiable(output)
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
        return (None, *(next(found) if _differentiable(value) else None for value in args))


def _inputs_again(ctx: Any, *, detached: bool) -> list[Any]:
    saved = iter(ctx.saved_tensors)
    args: list[Any] = []
    for position, tensor in enumerate(ctx.tensors):
        value = next(saved) if tensor else ctx.others[position]
        if tensor and detached:
            value = value.detach().requires_grad_(ctx.needs_input_grad[position + 1])
        args.append(value)
    return args


def _with_state(state: torch.Tensor | None, run: Callable[[], list[Any]]) -> list[Any]:
    """Run with the forward pass's generator state, and restore the current state afterwards."""
    if state is None:
        return run()
    now = torch.default_generator.get_state()
    torch.default_generator.set_state(state)
    try:
        return run()
    finally:
        torch.default_generator.set_state(now)


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _writes_to_inputs(module: fx.GraphModule) -> bool:
    """Whether running the graph changes an input, so that a second run gives another result."""
    for node in module.graph.nodes:
        example = _example(node)
        if node.op == "placeholder" and isinstance(example, torch.Tensor) and example._version:  # noqa: SLF001 - written to while it was traced
            return True
        name = getattr(node.target, "__name__", "")
        switch = _UPDATES_STATISTICS.get(name)
        if switch is not None and argument(node, 5, switch, default=name == "instance_norm"):
            return True
    return False


def _describe_outputs(module: fx.GraphModule, examples: Sequence[Any]) -> list[tuple[bool, bool]]:
    """Return for each output whether it is on the GPU, and whether gradients reach it."""
    reached = _reached_by_gradients(module, examples)
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    found = []
    for value in output.args[0]:
        example = _example(value)
        found.append((on_gpu(example), value in reached))
    return found


def _reached_by_gradients(module: fx.GraphModule, examples: Sequence[Any]) -> set[Any]:
    """Return the nodes through which gradients flow; the fake tensors do not record this."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    reached: set[Any] = {
        node for node, value in zip(inputs, examples, strict=True) if _differentiable(value)
    }
    enabled = torch.is_grad_enabled()
    for node in module.graph.nodes:
        example = _example(node)
        if node.target is torch._C._set_grad_enabled:  # noqa: SLF001 - as it stands in graphs
            enabled = bool(node.args[0])
        elif enabled and node.target != "detach" and _is_or_has_float(example):
            reached.update({node} if not reached.isdisjoint(node.all_input_nodes) else ())
    return reached


def _is_or_has_float(example: Any) -> bool:
    if isinstance(example, (tuple, list)):
        return any(_is_or_has_float(item) for item in example)
    return isinstance(example, torch.Tensor) and (
        example.dtype.is_floating_point or example.dtype.is_complex
    )


def _on_gpu(node: Any) -> bool:
    example = _example(node)
    values = example if isinstance(example, (tuple, list)) else [example]
    return any(on_gpu(value) for value in values if isinstance(value, torch.Tensor))


def _example(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None
