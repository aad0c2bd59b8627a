"""A captured graph: run by the worker that has its weights, or by the function's process."""

import operator
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.autograd_function import autograd_function_apply
from torch._higher_order_ops.wrap import tag_activation_checkpoint

from torch_shim.advice import CodePlace
from torch_shim.capture.encode import NotShippable, argument, encode, line_of_operator, nodes_of
from torch_shim.capture.local_run import example_of, modes_left, on_gpu, run_with_given, without_gpu
from torch_shim.capture.roots import Root, Roots, root_of_inputs
from torch_shim.capture.traces.snapshots import CallState
from torch_shim.errors import BadFrame, NoWeights, RemoteFailure
from torch_shim.leases import request_context
from torch_shim.leases.leasing import ModelLeases
from torch_shim.process_report import report
from torch_shim.raised_failures import error_of
from torch_shim.remote.program import RemoteProgram
from torch_shim.tensors import write_epochs
from torch_shim.tensors.absent_bytes import bring
from torch_shim.tensors.handles import CudaTensor, NoTorchFunction, become_cuda
from torch_shim.wire.arithmetic import as_state, turns
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
        # The roots that were asked for gradients, which repeat a remote forward pass here: their
        # later calls run locally.
        self.training: weakref.WeakSet[Root] = weakref.WeakSet()
        self._writes = _what_it_writes_to(module)
        self._reentrant = any(
            node.target is tag_activation_checkpoint
            and node.kwargs.get("use_reentrant") is not False
            for node in nodes_of(module)
        )
        self._loose: Root | None = None
        self._remote: RemoteProgram | None = None
        self.random = True  # unless a program says that it draws no random numbers
        self._reason = self._why_local(examples)
        if not self._reason:
            try:
                self._remote = RemoteProgram(encode(module), self.operators)
                self.random = self._remote.random
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
        if not self._roots.has_manager:
            return self.run_locally(args, "no GPU manager was named (GPUFAAS_ADDRESS)")
        try:
            return self._remote.run(args, ModelLeases(self._roots.leases, self.root_of(args)))
        except (NoWeights, BadFrame) as error:
            return self.run_locally(args, str(error))
        except RemoteFailure as failure:
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
            root = self._roots.local.root
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
        current = self._roots.local.root
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
        if root in self.training or root is self._roots.repeated_root:
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
        self.random_state = torch.default_generator.get_state() if graph.random else None
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
        call.graph.training.add(call.root)
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


_ENTER = torch.autograd.grad_mode._enter_inference_mode  # noqa: SLF001 - as it stands in graphs
_EXIT = torch.autograd.grad_mode._exit_inference_mode  # noqa: SLF001 - see above


def with_bases(module: fx.GraphModule, examples: Sequence[Any]) -> fx.GraphModule:
    """Return the graph, and as further outputs what several of its outputs are views of.

    Where no gradients are recorded they need only share memory, and a base may be large.
    """
    if not torch.is_grad_enabled():
        return module
    output: Any = module.graph.output_node().args[0]
    bases = _bases_of(output, _reached_by_gradients(module, examples))
    if not bases:
        return module
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    outputs: Any = graph.graph_copy(module.graph, copies)
    graph.output((*outputs, *(copies[base] for base in bases)))
    found = fx.GraphModule(module, graph)
    found.meta.update(module.meta)
    return found


class Outputs:
    """The outputs of one graph, by their positions: devices, gradients, what they are views of."""

    def __init__(self, module: fx.GraphModule, examples: Sequence[Any]) -> None:
        returned: Any = module.graph.output_node().args[0]
        nodes = list(returned)
        reached = _reached_by_gradients(module, examples)
        self.on_gpu = [on_gpu(example_of(node)) for node in nodes]
        inputs = module.graph.find_nodes(op="placeholder")
        traced = {id(example_of(node)): number for number, node in enumerate(inputs)}
        # Outputs that are inputs, written to or not, by position: the numbers of the inputs.
        self.given = {
            position: traced[id(example_of(node))]
            for position, node in enumerate(nodes)
            if isinstance(example_of(node), torch.Tensor) and id(example_of(node)) in traced
        }
        self.differentiable = [node in reached for node in nodes]
        # Whether anything in the graph has a history, even if no output has.
        self.recorded = any(node.op != "placeholder" for node in reached)
        memory = _modes_of_memory(module)
        made_by = {position: _modes_of(node, memory) for position, node in enumerate(nodes)}
        self.modes = {position: modes[0] for position, modes in made_by.items() if modes}
        modes = {*self.modes.values()}
        # The mode that all outputs are made in, where the program enters one; None: the caller's.
        self.inference = modes.pop() if len(modes) == 1 else None
        # The modes of what the program makes and then records gradients of.
        self._recorded_modes = {
            mode
            for node in reached
            for source in node.all_input_nodes
            for mode in _modes_of(source, memory)
        }
        self.sources = _sources_of(module, nodes, reached)  # which output is a view of what
        computed = {node for node in nodes if node in reached and node.op != "placeholder"}
        # The positions in the order in which one output may be computed from those before it.
        self.stages = _stages(module, nodes, reached, computed)
        depth = sum(not self.sources.keys() >= set(stage) for stage in self.stages)
        self.obstacle = ""  # to answering in stages
        if depth > 1 and any(map(_is_overwritten, computed)):
            self.obstacle = "it changes its outputs while gradients are recorded"
        elif _share_memory(module, computed - {nodes[place] for place in self.sources}):
            self.obstacle = "its outputs share memory while gradients are recorded"

    def are_recorded(self) -> bool:
        """Whether the program records gradients when it is called in this thread's mode."""
        return not torch.is_inference_mode_enabled() or False in self.modes.values()

    def may_be_refused(self, args: Sequence[Any]) -> bool:
        """Whether gradients are recorded of an inference tensor, which torch saves for none."""
        caller = torch.is_inference_mode_enabled()
        return any(caller if mode is None else mode for mode in self._recorded_modes) or any(
            isinstance(value, torch.Tensor) and value.is_inference() for value in args
        )

    def make_views(self, values: list[Any], positions: Iterable[int], args: Sequence[Any]) -> None:
        """Make these outputs views of those others, or of the inputs, whose views they are."""
        for position in positions:
            source = self.sources.get(position)
            if source is not None:
                base = values[source] if source >= 0 else args[-1 - source]
                values[position] = _as_view(values[position], base)

    def in_their_modes(self, values: list[Any]) -> list[Any]:
        """Return the outputs, each an inference tensor or none as the program made it."""
        for position, mode in self.modes.items():
            if mode is not None and values[position].is_inference() != mode:
                values[position] = _made_in(mode, values[position])
        return values


def differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _stages(
    module: fx.GraphModule, outputs: Sequence[Any], reached: set[Any], computed: set[Any]
) -> list[list[int]]:
    """Group the outputs so that each follows from inputs and from outputs of groups before."""
    numbers: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        if node in reached:
            before = max((numbers.get(source, 0) for source in node.all_input_nodes), default=0)
            numbers[node] = before + (node in computed)
    stage_of = [max(1, numbers.get(node, 0)) if node in computed else 1 for node in outputs]
    return [
        [position for position, stage in enumerate(stage_of) if stage == number]
        for number in range(1, max(stage_of, default=0) + 1)
    ]


def _reached_by_gradients(module: fx.GraphModule, examples: Sequence[Any]) -> set[Any]:
    """Return the nodes through which gradients flow; the fake tensors do not record this."""
    inputs = module.graph.find_nodes(op="placeholder")
    reached: set[Any] = {
        node for node, value in zip(inputs, examples, strict=True) if differentiable(value)
    }
    enabled, inference = torch.is_grad_enabled(), False
    before: dict[Any, tuple[bool, bool]] = {}  # each inference mode that the program enters
    for node in module.graph.nodes:
        example = example_of(node)
        if node.target is torch._C._set_grad_enabled:  # noqa: SLF001 - as it stands in graphs
            enabled = bool(node.args[0])
        elif node.target is _ENTER:
            before[node] = enabled, inference
            enabled, inference = not node.args[0], bool(node.args[0])
        elif node.target is _EXIT:
            enabled, inference = before.get(node.args[0], (torch.is_grad_enabled(), False))
        elif enabled and not inference and _passes_gradients(node, example):
            reached.update({node} if not reached.isdisjoint(node.all_input_nodes) else ())
    return reached


def _passes_gradients(node: fx.Node, example: Any) -> bool:
    function: Any = node.args[0] if node.target is operator.getitem else None
    if isinstance(function, fx.Node) and function.target is autograd_function_apply:
        fixed: Any = function.kwargs.get("non_differentiable_idx", ())  # as it marked them
        if node.args[1] in fixed:
            return False
    return node.target != "detach" and _is_or_has_float(example)


def _modes_of_memory(module: fx.GraphModule) -> dict[int, bool | None]:
    """Return the inference mode in which the program made each storage, if it enters a mode.

    None is the caller's mode. What lies in an input's memory is as the input is.
    """
    if not any(node.target is _ENTER for node in module.graph.nodes):
        return {}
    mode: bool | None = None
    before: dict[Any, bool | None] = {}
    modes: dict[int, bool | None] = {}
    inputs: set[int] = set()
    for node in module.graph.nodes:
        if node.target is _ENTER:
            before[node], mode = mode, bool(node.args[0])
        elif node.target is _EXIT:
            mode = before.get(node.args[0])
        for storage in _storages_of(example_of(node)):
            modes.setdefault(storage, mode)
            inputs.update({storage} if node.op == "placeholder" else ())
    return {storage: mode for storage, mode in modes.items() if storage not in inputs}


def _modes_of(node: Any, memory: Mapping[int, bool | None]) -> list[bool | None]:
    """Return the modes of a node's tensors; a view has that of its memory."""
    return [memory[storage] for storage in _storages_of(example_of(node)) if storage in memory]


def _made_in(mode: bool, value: torch.Tensor) -> torch.Tensor:  # noqa: FBT001 - torch's own word
    with torch.inference_mode(mode):
        made = torch.empty(0, dtype=value.dtype)
        return made.set_(
            value.untyped_storage(), value.storage_offset(), value.size(), value.stride()
        )


def _is_or_has_float(example: Any) -> bool:
    if isinstance(example, (tuple, list)):
        return any(_is_or_has_float(item) for item in example)
    return isinstance(example, torch.Tensor) and (
        example.dtype.is_floating_point or example.dtype.is_complex
    )


# Outputs that are views of inputs or of other outputs: what is written to one is in all of them.
#
# An answered call makes such an output from its source anew, so that autograd knows what they
# share.


def _sources_of(
    module: fx.GraphModule, outputs: Sequence[Any], reached: Container[Any]
) -> dict[int, int]:
    """Return which output is a view of which, by their positions; -1 - n is input n.

    Sources are views of no other source. Both have a history, as `reached` nodes do, or neither.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    places = {node: position for position, node in enumerate(outputs)}
    places |= {node: -1 - number for number, node in enumerate(inputs)}
    sources: dict[int, int] = {}
    for position, node in enumerate(outputs):
        viewed = [source for source in _viewed(node, reached)[1:] if source in places]
        if not viewed:
            continue
        one, other = example_of(viewed[-1]), example_of(node)
        lazy_alike = one.is_conj() == other.is_conj() and one.is_neg() == other.is_neg()
        if lazy_alike and one.dtype == other.dtype:  # the same bytes are the same values in both
            sources[position] = places[viewed[-1]]
    return sources


def _bases_of(outputs: Sequence[Any], reached: Container[Any]) -> list[fx.Node]:
    """Return what several outputs are views of, and is none itself.

    What one operator splits into pieces is left out: torch lets nobody write to those.
    """
    above: dict[fx.Node, list[fx.Node]] = {}
    for node in dict.fromkeys(outputs):
        if isinstance(example_of(node), torch.Tensor):
            above.setdefault(_viewed(node, reached)[-1], []).append(node)
    return [
        base
        for base, nodes in above.items()
        if base not in outputs
        and base.op.startswith("call_")
        and isinstance(example_of(base), torch.Tensor)
        and len(nodes) > 1
        and not all(map(_is_split, nodes))
    ]


def _as_view(value: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a view of another one, unless it is that one, in whose memory it lies."""
    if value is base:
        return value
    memories = {write_epochs.storage_of(tensor)._cdata for tensor in (value, base)}  # noqa: SLF001 - its identity
    if value.is_inference() or base.is_inference() or len(memories) > 1:
        return value
    return base.as_strided(value.size(), value.stride(), value.storage_offset())


def _is_overwritten(node: fx.Node) -> bool:
    """Whether another node writes to the memory of this one, so that it is no one value."""
    memory, version = _storages_of(example_of(node)), example_of(node)._version  # noqa: SLF001 - raised by every write, in traces too
    made_by = [node, *_nodes_below(node)][-1]
    if not version or not memory or any(at.op == "get_attr" for at in made_by.all_input_nodes):
        return bool(version)  # a graph of its own may write
    # Some operators write to what they make: compute it again, in fake tensors.
    args, kwargs = fx.node.map_arg((made_by.args, made_by.kwargs), example_of)
    target: Any = made_by.target
    if made_by.op == "call_method":
        target = getattr(args[0], target)
    elif made_by.op != "call_function":
        return True
    place = _storages_of(example_of(made_by)).index(memory[0])
    made = target(*args, **kwargs)
    return bool(_tensors_of(made)[place]._version != version)  # noqa: SLF001 - see above


def _share_memory(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> bool:
    """Whether some of these nodes lie in one memory, or in an input's.

    Those that one operator splits a tensor into are left out: torch lets nobody write to them.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    taken = {storage for node in inputs for storage in _storages_of(example_of(node))}
    split: set[int] = set()
    for node in nodes:
        mine = set(_storages_of(example_of(node)))
        if _is_split(node):
            split |= mine
        elif mine & taken:
            return True
        else:
            taken |= mine
    return not split.isdisjoint(taken)


def _storages_of(example: Any) -> list[int]:
    """Return what tells the storages of a node's tensors from others."""
    return [
        value.untyped_storage()._cdata  # noqa: SLF001 - its identity
        for value in _tensors_of(example)
    ]


def _tensors_of(example: Any) -> list[torch.Tensor]:
    values = example if isinstance(example, (tuple, list)) else [example]
    return [
        value
        for value in values
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
    ]


def _viewed(node: Any, reached: Container[Any]) -> list[Any]:
    """Return a node, and those below it that have a history, or have none, as it has."""
    passed = [node]
    for source in _nodes_below(node):
        if passed[-1].target == "detach" or (source in reached) != (node in reached):
            break
        passed.append(source)
    return passed


def _nodes_below(node: Any) -> Iterator[fx.Node]:
    """Yield the nodes in whose memory a node's value lies, the nearest first."""
    while isinstance(node, fx.Node):
        mine = set(_storages_of(example_of(node)))
        sources = node.all_input_nodes
        node = next(
            (at for at in sources if not mine.isdisjoint(_storages_of(example_of(at)))), None
        )
        if node is not None:
            yield node


def _is_split(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(example_of(source), (tuple, list))
