"""A captured graph's outputs: their devices, their gradients, what they are views of."""

import operator
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.autograd_function import autograd_function_apply

from torch_shim.capture.local_run import example_of, on_gpu
from torch_shim.tensors import write_epochs

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
    """The outputs of one graph, by their positions."""

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
        if depth > 1 and any(map(_is_written, computed)):
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


def _is_written(node: fx.Node) -> bool:
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
