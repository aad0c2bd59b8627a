"""Outputs that are views of inputs or of other outputs: what is written to one is in all of them.

An answered call makes such an output from its source anew, so that autograd knows what they share.
"""

import operator
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from torch_shim.tensors import write_epochs


def example_of(node: Any) -> Any:
    """Return the fake value with which a node was traced."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def sources_of(
    module: fx.GraphModule, outputs: Sequence[Any], reached: Container[Any]
) -> dict[int, int]:
    """Return which output is a view of which, by their positions; -1 - n is input n.

    Sources are views of no other source. Both have a history, as `reached` nodes do, or neither.
    """
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    places = {node: position for position, node in enumerate(outputs)}
    places |= {node: -1 - number for number, node in enumerate(inputs)}
    sources: dict[int, int] = {}
    for position, node in enumerate(outputs):
        viewed = [source for source in _viewed(node, reached)[1:] if source in places]
        if viewed and _are_alike(example_of(viewed[-1]), example_of(node)):
            sources[position] = places[viewed[-1]]
    return sources


def bases_of(outputs: Sequence[Any], reached: Container[Any]) -> list[fx.Node]:
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


def as_view(value: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a view of another one, unless it is that one, in whose memory it lies."""
    if value is base:
        return value
    memories = {write_epochs.storage_of(tensor)._cdata for tensor in (value, base)}  # noqa: SLF001 - its identity
    if value.is_inference() or base.is_inference() or len(memories) > 1:
        return value
    return base.as_strided(value.size(), value.stride(), value.storage_offset())


def is_written(node: fx.Node) -> bool:
    """Whether another node writes to the memory of this one, so that it is no one value."""
    memory, version = storages_of(example_of(node)), example_of(node)._version  # noqa: SLF001 - raised by every write, in traces too
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
    place = storages_of(example_of(made_by)).index(memory[0])
    made = target(*args, **kwargs)
    return bool(_tensors_of(made)[place]._version != version)  # noqa: SLF001 - see above


def share_memory(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> bool:
    """Whether some of these nodes lie in one memory, or in an input's.

    Those that one operator splits a tensor into are left out: torch lets nobody write to them.
    """
    inputs = (node for node in module.graph.nodes if node.op == "placeholder")
    taken = {storage for node in inputs for storage in storages_of(example_of(node))}
    split: set[int] = set()
    for node in nodes:
        mine = set(storages_of(example_of(node)))
        if _is_split(node):
            split |= mine
        elif mine & taken:
            return True
        else:
            taken |= mine
    return not split.isdisjoint(taken)


def storages_of(example: Any) -> list[int]:
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
        mine = set(storages_of(example_of(node)))
        sources = node.all_input_nodes
        node = next(
            (at for at in sources if not mine.isdisjoint(storages_of(example_of(at)))), None
        )
        if node is not None:
            yield node


def _are_alike(one: Any, other: Any) -> bool:
    """Whether the same bytes are the same values in both tensors."""
    lazy = one.is_conj() == other.is_conj() and one.is_neg() == other.is_neg()
    return bool(lazy and one.dtype == other.dtype)


def _is_split(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(example_of(source), (tuple, list))
