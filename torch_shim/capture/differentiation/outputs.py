"""What is known of a captured graph's outputs before it runs: devices, gradients, dependencies."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torch_shim.capture.dynamo import on_gpu


class Outputs:
    """The outputs of one graph, by their positions."""

    def __init__(self, module: fx.GraphModule, examples: Sequence[Any]) -> None:
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        nodes = list(output.args[0])
        reached = _reached_by_gradients(module, examples)
        self.on_gpu = [on_gpu(example_of(node)) for node in nodes]
        self.differentiable = [node in reached for node in nodes]
        # The positions in the order in which one output may be computed from those before it;
        # None where an output is also written to, so that it has no one place in this order.
        self.stages = _stages(module, nodes, reached)


def example_of(node: Any) -> Any:
    """Return the fake value with which a node was traced."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def differentiable(value: Any) -> bool:
    """Whether this is a tensor that gradients are recorded for."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def _stages(
    module: fx.GraphModule, outputs: Sequence[Any], reached: set[Any]
) -> list[list[int]] | None:
    """Group the outputs so that each follows from inputs and from outputs of groups before."""
    computed = {node for node in outputs if node in reached and node.op != "placeholder"}
    numbers: dict[fx.Node, int] = {}
    for node in module.graph.nodes:
        if node in reached:
            before = max((numbers.get(source, 0) for source in node.all_input_nodes), default=0)
            numbers[node] = before + (node in computed)
    stage_of = [max(1, numbers.get(node, 0)) if node in computed else 1 for node in outputs]
    stages = [
        [position for position, stage in enumerate(stage_of) if stage == number]
        for number in range(1, max(stage_of, default=0) + 1)
    ]
    if len(stages) > 1 and any(example_of(node)._version for node in computed):  # noqa: SLF001 - raised by every write, in traces too
        return None
    return stages


def _reached_by_gradients(module: fx.GraphModule, examples: Sequence[Any]) -> set[Any]:
    """Return the nodes through which gradients flow; the fake tensors do not record this."""
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    reached: set[Any] = {
        node for node, value in zip(inputs, examples, strict=True) if differentiable(value)
    }
    enabled = torch.is_grad_enabled()
    for node in module.graph.nodes:
        example = example_of(node)
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
