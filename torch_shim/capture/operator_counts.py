"""How many operators a module runs that is not traced: what stays in the function is counted."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_READS = frozenset({"__get__", "size", "dim", "stride", "is_floating_point", "numel"})


class OperatorCount(TorchFunctionMode):
    """Counts the operators that Python calls inside of the `with` block."""

    operators = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count the operator and run it."""
        del types
        self.operators += getattr(func, "__name__", "") not in _READS
        return func(*args, **(kwargs or {}))


def of_script(module: torch.jit.ScriptModule) -> int:
    """Return the number of operators in a scripted module."""
    graph = getattr(module, "inlined_graph", None)
    return _operators_in(graph) if graph is not None else 0


def _operators_in(block: Any) -> int:
    return sum(
        node.kind().startswith("aten::") + sum(map(_operators_in, node.blocks()))
        for node in block.nodes()
    )
