"""What is known of a captured graph's outputs before it runs: devices, gradients, dependencies."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.autograd_function import autograd_function_apply

from torch_shim.capture.differentiation import views
from torch_shim.capture.differentiation.views import example_of, storages_of
from torch_shim.capture.dynamo import on_gpu

_ENTER = torch.autograd.grad_mode._enter_inference_mode  # noqa: SLF001 - as it stands in graphs
_EXIT = torch.autograd.grad_mode._exit_inference_mode  # noqa: SLF001 - see above


def with_bases(module: fx.GraphModule, examples: Sequence[Any]) -> fx.GraphModule:
    """Return the graph, and as further outputs what several of its outputs are views of.

    Where no gradients are recorded they need only share memory, and a base may be large.
    """
    if not torch.is_grad_enabled():
        return module
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    bases = views.bases_of(output.args[0], _reached_by_gradients(module, examples))
    if not bases:
        return module
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    outputs: Any = graph.graph_copy(module.graph, copies)
    graph.output((*outputs, *(copies[base] for base in bases)))
    found = fx.GraphModule(module, graph)
    found.meta.update(module.meta)
    return found


class Outputs:
    """The outputs of one graph, by their positions."""

    def __init__(self, module: fx.GraphModule, examples: Sequence[Any]) -> None:
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        nodes = list(output.args[0])
        reached = _reached_by_gradients(module, examples)
        self.on_gpu = [on_gpu(example_of(node)) for node in nodes]
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
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
        self._sources = views.sources_of(module, nodes, reached)
        computed = {node for node in nodes if node in reached and node.op != "placeholder"}
        # The positions in the order in which one output may be computed from those before it.
        self.stages = _stages(module, nodes, reached, computed)
        depth = sum(not self._sources.keys() >= set(stage) for stage in self.stages)
        self.obstacle = ""  # to answering in stages
        if depth > 1 and any(map(views.is_written, computed)):
            self.obstacle = "it changes its outputs while gradients are recorded"
        elif views.share_memory(module, computed - {nodes[place] for place in self._sources}):
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
        for position in positions if self._sources else ():
            source = self._sources.get(position)
            if source is not None:
                base = values[source] if source >= 0 else args[-1 - source]
                values[position] = views.as_view(values[position], base)

    def in_their_modes(self, values: list[Any]) -> list[Any]:
        """Return the outputs, each an inference tensor or none as the program made it."""
        for position, mode in self.modes.items():
            if mode is not None and values[position].is_inference() != mode:
                values[position] = _made_in(mode, values[position])
        return values


def differentiable(value: Any) -> bool:
    """Whether this is a tensor that gradients are recorded for."""
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
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
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
        for storage in storages_of(example_of(node)):
            modes.setdefault(storage, mode)
            inputs.update({storage} if node.op == "placeholder" else ())
    return {storage: mode for storage, mode in modes.items() if storage not in inputs}


def _modes_of(node: Any, memory: Mapping[int, bool | None]) -> list[bool | None]:
    """Return the modes of a node's tensors; a view has that of its memory."""
    return [memory[storage] for storage in storages_of(example_of(node)) if storage in memory]


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
