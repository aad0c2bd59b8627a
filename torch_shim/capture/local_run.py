"""Runs a captured graph on the function's own processor: the same steps without GPU devices."""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.autograd_function import autograd_function_apply
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.amp import autocast_mode
from torch.autograd import grad_mode
from torch.utils import checkpoint as checkpoints

from torch_shim.kernels import substitution

ON_GPU = "_gpufaas_on_gpu"  # the mark of a traced tensor
_TO_DEVICE = frozenset({"cuda", "cpu"})
_functorch = torch._C._functorch  # noqa: SLF001 - torch has no public way to ask
_set_grad_enabled = torch._C._set_grad_enabled  # noqa: SLF001 - as it stands in graphs
_NO_GRAD = [(_set_grad_enabled, (False,)), (_set_grad_enabled, (True,))]
_native_inference_mode: Any = grad_mode._enter_inference_mode  # noqa: SLF001 - as it stands in graphs
_native_autocast: Any = autocast_mode._enter_autocast  # noqa: SLF001 - see above


def example_of(node: Any) -> Any:
    """Return the fake value with which a node was traced."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def on_gpu(example: Any) -> bool:
    return isinstance(example, torch.Tensor) and getattr(example, ON_GPU, False)


class _OpenModes(threading.local):
    """The modes that graphs have entered in this thread and not left yet."""

    def __init__(self) -> None:
        self.entered: list[Any] = []


_open = _OpenModes()


@contextlib.contextmanager
def modes_left() -> Iterator[None]:
    """Leave the modes that a graph has entered, if it fails inside the `with` block."""
    entered, level = len(_open.entered), _functorch.get_dynamic_layer_stack_depth()
    records = torch.is_grad_enabled()
    try:
        yield
    except BaseException:
        while _functorch.get_dynamic_layer_stack_depth() > level:
            _functorch.pop_dynamic_layer_stack()
        while len(_open.entered) > entered:
            _leave(_open.entered[-1])
        _set_grad_enabled(records)
        raise


def _enter_inference_mode(mode: bool) -> Any:  # noqa: FBT001 - as it stands in graphs
    _open.entered.append(_native_inference_mode(mode))
    return _open.entered[-1]


def _enter_autocast(*options: Any) -> Any:
    _open.entered.append(_native_autocast(*options))
    return _open.entered[-1]


def _leave(mode: Any) -> None:
    if mode in _open.entered:
        _open.entered.remove(mode)
    mode.__exit__(None, None, None)


def _checkpointed(graph: fx.GraphModule, *args: Any, **options: Any) -> Any:
    """Repeat a part of the graph in the backward pass as its module would, dropout included."""
    context = graph.meta.get("_checkpoint_context_fn")
    options = options if context is None else {**options, "context_fn": context}

    def run(*given: Any) -> Any:
        with modes_left():  # a repetition stops where it has what the backward pass needs
            return graph.forward(*(given or args))

    # Among the arguments are buffers, and torch's newer kind lets no region write to an argument.
    sent = () if options.get("use_reentrant") is False else args
    return checkpoints.checkpoint(run, *sent, **options)


# What stands in graphs for a compiler, and what is called instead.
_CALLED: dict[Any, Any] = {
    tag_activation_checkpoint: _checkpointed,
    _native_inference_mode: _enter_inference_mode,
    grad_mode._exit_inference_mode: _leave,  # noqa: SLF001 - see above
    _native_autocast: _enter_autocast,
    autocast_mode._exit_autocast: _leave,  # noqa: SLF001 - see above
}


def without_gpu(module: fx.GraphModule) -> fx.GraphModule:
    """Return the graph, and in it the branches and bodies of loops, without GPU devices."""
    graph = fx.Graph()
    copied = graph.graph_copy(module.graph, {})
    graph.output(copied)
    for node in list(graph.nodes):
        if node.op == "call_method" and node.target in _TO_DEVICE:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            continue
        operator, name = substitution.operator_of(node)
        if operator is not None and substitution.has_substitute(name):
            node.op, node.target = "call_function", substitution.with_substitute(operator, name)
        node.target = _CALLED.get(node.target, node.target)
        node.args = fx.node.map_aggregate(node.args, _processor)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _processor)
    copy = fx.GraphModule(module, graph)
    copy.meta.update(module.meta)
    for name, part in list(copy.named_children()):
        if isinstance(part, fx.GraphModule):
            setattr(copy, name, without_gpu(part))
    for node in graph.find_nodes(op="call_function", target=autograd_function_apply):
        _record_backward(getattr(copy, node.args[1].target))
    return copy


def _record_backward(backward: fx.GraphModule) -> None:
    """Have a custom function's backward record gradients where its caller asks for their gradients.

    Dynamo traces it between two steps that turn the recording off and on again.
    """
    steps = [node for node in backward.graph.nodes if node.op.startswith("call")]
    around = steps[:1] + steps[-1:]
    if [(step.target, step.args) for step in around] == _NO_GRAD:
        for step in around:
            backward.graph.erase_node(step)
        backward.recompile()


def _processor(value: Any) -> Any:
    """Replace CUDA devices and autocast's CUDA device names with the CPU's."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


def run_with_given(
    module: fx.GraphModule, args: Sequence[Any], given: Mapping[int, Any]
) -> list[Any]:
    """Run a graph; what follows from outputs that are given is computed from those."""
    if not given:
        return list(module.forward(*args))
    outputs: Any = module.graph.output_node().args[0]
    values = {outputs[position]: value for position, value in given.items()}
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
