"""A captured graph: run by the worker that has its weights, or by the function's process."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint

from torch_shim.advice import CodePlace
from torch_shim.capture.encode import NotShippable, argument, encode, line_of_operator, nodes_of
from torch_shim.capture.local_run import example_of, modes_left, on_gpu, run_with_given, without_gpu
from torch_shim.capture.outputs import Outputs, differentiable, with_bases
from torch_shim.capture.root_modules import Root, Roots, root_of_inputs
from torch_shim.capture.traces.snapshots import CallState
from torch_shim.errors import BadFrame, NoWeights, RemoteFailure
from torch_shim.leases import request_context
from torch_shim.process_report import report
from torch_shim.raised_failures import error_of
from torch_shim.remote.call_settings import as_state, turns
from torch_shim.remote.program import RemoteProgram
from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import bring
from torch_shim.tensors.handles import CudaTensor, NoTorchFunction, become_cuda
from torch_shim.wire.protocol import FailureKind

# Functions that write to running statistics without a version counter, and the enabling argument.
_UPDATES_STATISTICS = {"batch_norm": "training", "instance_norm": "use_input_stats"}
_NO_MEMORY = frozenset({FailureKind.OUT_OF_MEMORY, FailureKind.TOO_LARGE})
_RUNS_LOCALLY = frozenset({FailureKind.OPERATOR, FailureKind.PROGRAM, FailureKind.INTERNAL})


class Graph:
    """One captured piece of a module, which Dynamo calls in place of the module's own code."""

    def __init__(self, module: fx.GraphModule, examples: Sequence[Any], roots: Roots) -> None:
        returned: Any = module.graph.output_node().args[0]
        self._count = len(returned)  # of the outputs; the bases of some follow
        module = with_bases(module, examples)
        self.operators = sum(node.op.startswith("call_") for node in nodes_of(module))
        # A graph over CPU tensors would run on the CPU without the shim too: it is not counted.
        self._missed = self.operators if any(map(_on_gpu, module.graph.nodes)) else 0
        self._roots = roots
        self._module = module
        self._place: CodePlace | None = None  # the line that keeps the graph in the function
        self._local = without_gpu(module)
        self.outputs = Outputs(module, examples)
        self._grad = self.outputs.recorded
        # Whether the program itself sees to it that nothing is recorded.
        self._leaves_out = not self._grad and (
            self.outputs.inference is not None
            or (torch.is_grad_enabled() and any(map(differentiable, examples)))
        )
        self._training: weakref.WeakSet[Root] = weakref.WeakSet()  # those asked for gradients
        self._writes = _what_it_writes_to(module)
        self._reentrant = any(
            node.target is tag_activation_checkpoint
            and node.kwargs.get("use_reentrant") is not False
            for node in nodes_of(module)
        )
        self._loose: Root | None = None
        self._remote: RemoteProgram | None = None
        self._reason = self._why_local(examples)
        if not self._reason:
            try:
                self._remote = RemoteProgram(encode(module), self.operators)
            except NotShippable as error:
                self._reason, self._place = str(error), error.place

    def __call__(self, *args: Any) -> list[Any]:
        self._roots.note_graph()
        with NoTorchFunction():
            if self._remote is None:
                outputs = self.run_locally(args, self._reason)
            elif self._grad and self.outputs.are_recorded():
                outputs = self._with_gradients(args)
            elif self._leaves_out:
                mode = self.outputs.inference  # which the program enters for all of its outputs
                with torch.no_grad() if mode is None else torch.inference_mode(mode):
                    outputs = self._answer(args)
            else:
                outputs = self._answer(args)
                if self.outputs.sources:
                    self.outputs.make_views(outputs, range(len(outputs)), args)
            if self.outputs.modes:
                outputs = self.outputs.in_their_modes(outputs)
            for position, number in self.outputs.given.items():
                outputs[position] = args[number]
            for value, is_gpu in zip(outputs, self.outputs.on_gpu, strict=True):
                if is_gpu and isinstance(value, torch.Tensor):
                    become_cuda(value)
        return outputs[: self._count]

    def _answer(self, args: Sequence[Any]) -> list[Any]:
        """Run the graph on a worker if possible, else in this process."""
        assert self._remote is not None
        root = self.root_of(args)
        try:
            return self._ask(args, root)
        except RemoteFailure as failure:
            if failure.failure == FailureKind.UNKNOWN_MODEL:  # the manager has been restarted
                self._roots.forget(root)
                return self._ask(args, root)
            if failure.failure in _NO_MEMORY:
                raise torch.cuda.OutOfMemoryError(
                    f"CUDA out of memory. {failure.message}"
                ) from failure
            if failure.failure not in _RUNS_LOCALLY:
                raise error_of(failure) from failure
            reason = f"{failure.failure}: {failure.message}"[:200]
            self._place = line_of_operator(self._module, failure.message)
            outputs = self.run_locally(args, reason)
            # What fails here too is the caller's error; what does not would fail there every time.
            self._reason, self._remote = reason, None
            return outputs
        except BadFrame as error:
            return self.run_locally(args, str(error))

    def _ask(self, args: Sequence[Any], root: Root) -> list[Any]:
        assert self._remote is not None
        if not self._roots.has_manager:
            return self.run_locally(args, "no GPU manager was named (GPUFAAS_ADDRESS)")
        try:
            return self._remote.run(args, self._roots.lease_source(root))
        except NoWeights as error:
            return self.run_locally(args, str(error))

    def run_locally(
        self,
        args: Sequence[Any],
        reason: str,
        given: Mapping[int, Any] | None = None,
        what: str = "",
    ) -> list[Any]:
        """Run the graph on the function's own processor, and count the call, by this name.

        What follows from outputs that are `given`, by position, is computed from them.
        """
        if self.operators:
            root = self._roots.current
            what = what or (root.name if root else "a compiled function")
            report.local_call(reason, self._missed, what, self._place)
        bring(args)
        with request_context.timed_locally(reason), modes_left():
            outputs = run_with_given(self._local, args, given or {})
        if self._writes:
            for value in args:
                if isinstance(value, CudaTensor):
                    write_epochs.note_write(value)
        return outputs

    def root_of(self, args: Sequence[Any]) -> Root:
        """Return the root that owns the weights: the module being called, else the inputs."""
        current = self._roots.current
        if current is not None:
            return current
        if self._loose is None:
            self._loose = root_of_inputs(args)
        return self._loose

    def _with_gradients(self, args: Sequence[Any]) -> list[Any]:
        if self._writes:
            return self.run_locally(
                args, f"it writes to {self._writes} while gradients are recorded"
            )
        if self._reentrant:  # its backward pass refuses to run under `torch.autograd.grad`
            return self.run_locally(args, "a reentrant checkpoint computes gradients")
        if self.outputs.may_be_refused(args):
            return self.run_locally(args, "it records gradients of inference tensors")
        root = self.root_of(args)
        if root in self._training or root is self._roots.repeated_root:
            return self.run_locally(args, "gradients are asked for: training runs locally")
        if self.outputs.obstacle:
            return self.run_locally(args, self.outputs.obstacle)
        call = _AnsweredCall(self, root)
        if torch.is_grad_enabled():
            return self._answer_in_stages(call, args)
        with torch.inference_mode(mode=False):  # gradients are recorded inside of the program
            return self._answer_in_stages(call, args)

    def _answer_in_stages(self, call: "_AnsweredCall", args: Sequence[Any]) -> list[Any]:
        """Run the forward pass on a worker; gradients come from here if they are asked for."""
        outputs = self.outputs
        turns.forget_sent()
        with torch.no_grad():
            values = self._answer(args)
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

    def is_random(self) -> bool:
        return self._remote is None or self._remote.random

    def note_training(self, root: Root) -> None:
        """Run the root's later calls locally: gradients repeat a remote forward pass here."""
        self._training.add(root)

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


def _what_it_writes_to(module: fx.GraphModule) -> str:
    """Say what running the graph changes, so that a second run gives another result, if anything.

    Dynamo names what is a module's buffer so.
    """
    nodes = list(nodes_of(module))
    written = [node for node in nodes if node.op == "placeholder" and _is_written(node)]
    if any("_buffers_" not in node.name for node in written):
        return "its inputs"
    return "its buffers" if written or any(map(_updates_statistics, nodes)) else ""


def _is_written(node: fx.Node) -> bool:
    example = example_of(node)
    return isinstance(example, torch.Tensor) and example._version > 0  # noqa: SLF001 - written to while it was traced


def _updates_statistics(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    switch = _UPDATES_STATISTICS.get(name)
    return switch is not None and bool(argument(node, 5, switch, default=name == "instance_norm"))


def _on_gpu(node: Any) -> bool:
    example = example_of(node)
    values = example if isinstance(example, (tuple, list)) else [example]
    return any(on_gpu(value) for value in values if isinstance(value, torch.Tensor))


# A graph's answer with a history: backward repeats the forward pass in the function.
#
# A program may ask for gradients at an output from which another one follows, as at the
# activations that a hook keeps. So outputs that follow from each other have a history of several
# stages, and each stage takes the outputs of those before as inputs.


class _AnsweredCall:
    """What the backward pass of one answered call needs besides tensors."""

    def __init__(self, graph: Graph, root: Root) -> None:
        self.graph = graph
        self.root = root
        self.random_state = torch.default_generator.get_state() if graph.is_random() else None
        self.state = CallState()


class _Stage(torch.autograd.Function):
    """Some outputs of an answered call, which follow from its inputs and from other outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _AnsweredCall,
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
            if isinstance(value, torch.Tensor) and not call.graph.outputs.differentiable[position]
        ]
        ctx.mark_non_differentiable(*fixed)
        return tuple(answers)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        call: _AnsweredCall = ctx.call
        call.graph.note_training(call.root)
        again = torch.is_grad_enabled()  # the caller needs gradients of these gradients
        with NoTorchFunction(), call.state.restored():
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
    call: _AnsweredCall = ctx.call
    what = f"the backward pass of {call.root.name}"
    return call.graph.run_locally(values[:count], "backward", given, what)


def _with_state(state: torch.Tensor | None, run: Callable[[], list[Any]]) -> list[Any]:
    if state is None:
        return run()
    with turns.alone():
        now = torch.default_generator.get_state()
        torch.default_generator.set_state(state)
        try:
            return run()
        finally:
            torch.default_generator.set_state(now)
