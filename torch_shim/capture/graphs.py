"""A captured graph: run by the worker that has its weights, or by the function's process."""

import logging
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.wrap import tag_activation_checkpoint

from torch_shim.advice import CodePlace
from torch_shim.capture.differentiation import (
    Outputs,
    answer_in_stages,
    differentiable,
    example_of,
    run_with_given,
    with_bases,
)
from torch_shim.capture.dynamo import on_gpu
from torch_shim.capture.encode import NotShippable, argument, encode, line_of_operator, nodes_of
from torch_shim.capture.local_run import modes_left, without_gpu
from torch_shim.capture.root_modules import Root, Roots, root_of_inputs
from torch_shim.errors import BadFrame, NoWeights, RemoteFailure
from torch_shim.leases import request_context
from torch_shim.process_report import report
from torch_shim.raised_failures import error_of
from torch_shim.remote.program import RemoteProgram
from torch_shim.remote.single_operators import run_there
from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import bring
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
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        self._count = len(output.args[0])  # of the outputs; the bases of some follow
        module = with_bases(module, examples)
        self.operators = sum(node.op.startswith("call_") for node in nodes_of(module))
        # A graph over CPU tensors would run on the CPU without the shim too: it is not counted.
        self._missed = self.operators if any(map(_on_gpu, module.graph.nodes)) else 0
        self._roots = roots
        self._module = module
        self._place: CodePlace | None = None  # the line that keeps the graph in the function
        self._local = without_gpu(module)
        self._outputs = Outputs(module, examples)
        self._grad = self._outputs.recorded
        # Whether the program itself sees to it that nothing is recorded.
        self._leaves_out = not self._grad and (
            self._outputs.inference is not None
            or (torch.is_grad_enabled() and any(map(differentiable, examples)))
        )
        self._training: weakref.WeakSet[Root] = weakref.WeakSet()  # those asked for gradients
        self._writes = _what_it_writes_to(module)
        self._reentrant = any(map(_is_reentrant_checkpoint, nodes_of(module)))
        self._loose: Root | None = None
        self._remote: RemoteProgram | None = None
        self._reason = self._why_local(examples)
        if not self._reason:
            try:
                self._remote = RemoteProgram(encode(module), self.operators)
            except NotShippable as error:
                self._reason, self._place = str(error), error.place

    def __call__(self, *args: Any) -> list[Any]:
        self._roots.about_to_run()
        with _NoHandles():
            if self._remote is None:
                outputs = self.run_locally(args, self._reason)
            elif self._grad and self._outputs.are_recorded():
                outputs = self._with_gradients(args)
            elif self._leaves_out:
                outputs = self._without_gradients(args)
            else:
                outputs = self.answer(args)
                self._outputs.make_views(outputs, range(len(outputs)), args)
            if self._outputs.modes:
                outputs = self._outputs.in_their_modes(outputs)
            for position, number in self._outputs.given.items():
                outputs[position] = args[number]
            for value, is_gpu in zip(outputs, self._outputs.on_gpu, strict=True):
                if is_gpu and isinstance(value, torch.Tensor):
                    become_cuda(value)
        return outputs[: self._count]

    def _without_gradients(self, args: Sequence[Any]) -> list[Any]:
        """Answer in the mode that the program enters for all of its outputs."""
        mode = self._outputs.inference
        with torch.no_grad() if mode is None else torch.inference_mode(mode):
            return self.answer(args)

    def answer(self, args: Sequence[Any]) -> list[Any]:
        """Run the graph on a worker if possible, else in this process."""
        assert self._remote is not None
        root = self.root_of(args)
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
                raise error_of(failure) from failure
            reason = f"{failure.failure}: {failure.message}"[:200]
            self._place = line_of_operator(self._module, failure.message)
            outputs = self.run_locally(args, reason)
            # What fails here too is the caller's error; what does not would fail there every time.
            self._reason, self._remote = reason, None
            return outputs
        except BadFrame as error:
            return self.run_locally(args, str(error))

    def _answer(self, args: Sequence[Any], root: Root) -> list[Any]:
        assert self._remote is not None
        if not self._roots.has_manager:
            return self.run_locally(args, "no GPU manager was named (GPUFAAS_ADDRESS)")
        try:
            lease_for = self._roots.lease_source(root)
            return self._remote.run(args, lease_for, partial(run_there, lease_for))
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

    @property
    def random(self) -> bool:
        return self._remote is None or self._remote.random

    def _with_gradients(self, args: Sequence[Any]) -> list[Any]:
        if self._writes:
            return self.run_locally(
                args, f"it writes to {self._writes} while gradients are recorded"
            )
        if self._reentrant:  # its backward pass refuses to run under `torch.autograd.grad`
            return self.run_locally(args, "a reentrant checkpoint computes gradients")
        if self._outputs.may_be_refused(args):
            return self.run_locally(args, "it records gradients of inference tensors")
        root = self.root_of(args)
        if root in self._training or self._roots.is_repeated(root):
            return self.run_locally(args, "gradients are asked for: training runs locally")
        if self._outputs.obstacle:
            return self.run_locally(args, self._outputs.obstacle)
        return answer_in_stages(self, root, self._outputs, args)

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


def _is_reentrant_checkpoint(node: fx.Node) -> bool:
    newer = node.kwargs.get("use_reentrant") is False
    return node.target is tag_activation_checkpoint and not newer


def _on_gpu(node: Any) -> bool:
    example = example_of(node)
    values = example if isinstance(example, (tuple, list)) else [example]
    return any(on_gpu(value) for value in values if isinstance(value, torch.Tensor))
