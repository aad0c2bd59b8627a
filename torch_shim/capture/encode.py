"""Encodes a graph that Dynamo captured as a program, or states why that is not possible."""

import builtins
import functools
import math
import operator
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch._dynamo import utils
from torch._functorch.autograd_function import autograd_function_apply
from torch._numpy import random
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from torch_shim.advice import CodePlace
from torch_shim.capture.local_run import example_of, on_gpu
from torch_shim.patching import original_of
from torch_shim.tensors.dispatch import names
from torch_shim.tensors.handles import NoTorchFunction
from torch_shim.wire.programs import (
    Complex,
    Constant,
    DeviceName,
    Ellipse,
    Mapping,
    Named,
    PartName,
    Program,
    ProgramPart,
    ProgramStep,
    Ref,
    Slice,
    Tuple,
)


class NotShippable(Exception):
    """A graph contains something that a program cannot express, made by the line at `place`."""

    place: CodePlace | None = None


_LINES = re.compile(r'File "([^"]+)", line (\d+)')
_REFUSED = re.compile(r"operator '([^']+)'")
_DATA = "_get_data_attr"  # of torch._C._autograd: what graphs hold for `.data`
# What computes nothing: notes, switches for `requires_grad_`, questions that the trace answered.
_NO_OPERATORS = names(
    "_log_api_usage_once set_inplace_requires_grad_allowed _are_functorch_transforms_active"
)
# Higher-order operators that do no more, without gradients, than to call one of their graphs: the
# positions of the graph and of its first argument. Its steps stand in the program themselves.
_CALLS_ONCE = {
    "wrap": (0, 1),
    "tag_activation_checkpoint": (0, 1),
    "invoke_subgraph": (0, 2),
    "autograd_function_apply": (0, 2),
}
# The arguments of those that say how to compute gradients.
_OF_GRADIENTS = names(
    """use_reentrant preserve_rng_state context_fn determinism_check debug early_stop
    respect_saved_tensors_hooks non_differentiable_idx saved_for_backward_idx"""
)


def encode(module: fx.GraphModule) -> Program:
    """Return the program that computes what `module` does; NotShippable states the obstacle."""
    return _Encoder(module).program()


def nodes_of(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes of a graph and of the graphs in it: branches, bodies of loops."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield from part.graph.nodes


def line_of(node: fx.Node) -> CodePlace | None:
    lines = _LINES.findall(node.stack_trace or "")
    return CodePlace(lines[-1][0], int(lines[-1][1])) if lines else None


def line_of_operator(module: fx.GraphModule, refusal: str) -> CodePlace | None:
    """Return the line that made the operator which a worker's refusal names."""
    refused = _REFUSED.search(refusal)
    if refused is None:
        return None
    body = _Body(_Encoder(module), module)
    calls = (node for node in nodes_of(module) if node.op.startswith("call_"))
    return next((line_of(node) for node in calls if body.names(node, refused[1])), None)


# The namespaces of the functions in captured graphs; a program uses the first name found.
_NAMESPACES = """
torch.nn.functional torch torch.linalg torch.fft torch.special torch.functional torch.nn.init
torch._C._nn torch._C._linalg torch._C._fft torch._C._special torch._VF torch.amp.autocast_mode
torch._C torch._C._functorch torch._functorch.predispatch torch._functorch.vmap
torch.fx.experimental.symbolic_shapes torch._assert torch.autograd.grad_mode._enter_inference_mode
torch.autograd.grad_mode._exit_inference_mode
"""


def function_name(target: object) -> str | None:
    """Return the dotted name of a function that a graph may call; None if it is not torch's."""
    names = _function_names()
    return names.get(id(target)) or names.get(id(original_of(target)))


@functools.cache
def _function_names() -> dict[int, str]:
    """Return the names of the functions in the namespaces, by the identity of the function."""
    names: dict[int, str] = {}
    for path in _NAMESPACES.split():
        space: Any = torch
        for part in path.split(".")[1:]:
            space = getattr(space, part, None)
        functions = {path: space}
        if isinstance(space, (ModuleType, type)):
            functions = {f"{path}.{name}": getattr(space, name, None) for name in dir(space)}
        for name, function in functions.items():
            if callable(function) and not isinstance(function, type):
                names.setdefault(id(function), name)
                names.setdefault(id(original_of(function)), name)
    return names


class _Encoder:
    """Encodes one graph with its parts."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.random = False
        self._module = module
        self._parts: list[ProgramPart] = []
        self._part_numbers: dict[int, int] = {}

    def program(self) -> Program:
        body = _Body(self, self._module)
        inputs, output = body.encode()
        constants, steps = tuple(body.constants), tuple(body.steps)
        return Program(inputs, constants, steps, output, self.random, tuple(self._parts))

    def part(self, module: fx.GraphModule) -> PartName:
        number = self._part_numbers.get(id(module))
        if number is None:
            body = _Body(self, module)
            inputs, output = body.encode()
            if body.constants:
                raise NotShippable("a tensor of its own in a branch or the body of a loop")
            number = self._part_numbers[id(module)] = len(self._parts)
            self._parts.append(ProgramPart(inputs, tuple(body.steps), output))
        return PartName(number)


class _Body:
    """Encodes the nodes of one graph, and those of graphs that it calls once."""

    def __init__(self, encoder: _Encoder, module: fx.GraphModule) -> None:
        self._encoder = encoder
        self._module = module
        self._values: dict[fx.Node, Any] = {}
        self._computed: dict[fx.Node, torch.Tensor] = {}  # before the program runs
        self._first_step = 0
        self.constants: list[Constant] = []
        self.steps: list[ProgramStep] = []

    def encode(self) -> tuple[int, Any]:
        """Fill `constants` and `steps`; return the number of inputs, and the output."""
        inputs = self._module.graph.find_nodes(op="placeholder")
        computed = self._computed
        tensors: dict[fx.Node, torch.Tensor] = {}
        for module in _called_once_in(self._module):
            computed.update(_numpy_constants(module))
            tensors.update(_tensors_of(module))
        tensors.update(computed)
        self._first_step = len(inputs) + len(tensors)
        for number, node in enumerate([*inputs, *tensors]):
            self._values[node] = Ref(number)
        self.constants = [_constant(tensor) for tensor in tensors.values()]
        for node in computed:
            # Constants lie on the GPU: what NumPy made does not, unless it meets GPU tensors alone.
            if not all(on_gpu(example_of(user)) for user in node.users):
                self._values[node] = self._step("m:cpu", [self._values[node]], {})
        return len(inputs), self._encode_nodes(self._module)

    def _encode_nodes(self, module: fx.GraphModule) -> Any:
        output: Any = None
        for node in module.graph.nodes:
            if node.op in ("call_function", "call_method") and node not in self._computed:
                try:
                    self._call(node)
                except NotShippable as error:
                    error.place = error.place or line_of(node)
                    raise
            elif node.op == "output":
                output = self._value(node.args[0])
            elif node.op == "call_module":
                raise NotShippable(f"module {node.target}")
        return output

    def _call(self, node: fx.Node) -> None:
        if isinstance(node.target, HigherOrderOperator) and str(node.target) in _CALLS_ONCE:
            self._call_graph(node, *_CALLS_ONCE[str(node.target)])
            return
        if node.target is torch.Size:  # a tuple with methods that no operator asks for
            self._values[node] = self._size(node.args)
            return
        name = self._operator(node)
        if name.rpartition(".")[2] in _NO_OPERATORS:
            self._values[node] = example_of(node)
            return
        self._encoder.random = self._encoder.random or draws(name, node)
        arguments = node.args[:1] if name.startswith("g:") else node.args
        self._values[node] = self._step(
            name,
            [self._value(argument) for argument in arguments],
            {str(key): self._value(value) for key, value in node.kwargs.items()},
        )

    def _size(self, arguments: tuple[Any, ...]) -> Any:
        (sizes,) = arguments or ((),)
        return (
            Tuple([*map(self._value, sizes)])
            if isinstance(sizes, list | tuple)
            else self._value(sizes)
        )

    def _step(self, name: str, arguments: list[Any], named: dict[str, Any]) -> Ref:
        self.steps.append(ProgramStep(name, arguments, named))
        return Ref(self._first_step + len(self.steps) - 1)

    def _call_graph(self, node: fx.Node, position: int, first: int) -> None:
        graph = _graph_of(node.args[position])
        inputs = graph.graph.find_nodes(op="placeholder")
        values = [self._value(argument) for argument in node.args[first:]]
        if len(inputs) != len(values) or not _OF_GRADIENTS.issuperset(node.kwargs):
            raise NotShippable(f"higher-order operator {node.target} with other arguments")
        self._values.update(zip(inputs, values, strict=True))
        output = self._encode_nodes(graph)
        # This one's graph also returns what its backward needs.
        apart = node.target is autograd_function_apply
        self._values[node] = output.items[0] if apart else output

    def names(self, node: fx.Node, operator_name: str) -> bool:
        try:
            return self._operator(node) == operator_name
        except NotShippable:
            return False

    def _operator(self, node: fx.Node) -> str:
        target = node.target
        if node.op == "call_method":
            return f"m:{target}"
        if target is getattr:
            return f"g:{node.args[1]}"
        if isinstance(target, OpOverload):
            full = str(target.name())  # type: ignore[no-untyped-call]  # torch leaves it untyped
            return f"a:{full}" + ("" if "." in full else ".default")
        if isinstance(target, OpOverloadPacket):
            return f"a:{target._qualified_op_name}"  # noqa: SLF001 - its one full name
        if isinstance(target, HigherOrderOperator):
            if str(target) == "register_hook":  # worth nothing without the tensor's history
                raise NotShippable("a hook on a tensor that the graph computes")
            return f"h:{target}"
        return self._function(target)

    def _function(self, target: Any) -> str:
        if getattr(target, "__name__", "") == _DATA:
            return "g:data"
        name = function_name(target)
        if name is not None:
            return f"t:{name}"
        short = getattr(target, "__name__", "")
        if getattr(target, "__module__", "") == "torch._refs" and hasattr(torch, short):
            return f"t:torch.{short}"  # the Python implementation of the same function
        for letter, space in (("o", operator), ("M", math), ("b", builtins)):
            if getattr(space, short, None) is target:
                return f"{letter}:{short}"
        owner = getattr(target, "__objclass__", None)
        of_tensors = owner is not None and issubclass(torch.Tensor, owner)
        if of_tensors or getattr(torch.Tensor, short, None) is target:
            return f"m:{short}"
        numpy_name = _numpy_name_of(target)
        if numpy_name is not None:
            return numpy_name
        raise NotShippable(f"function {getattr(target, '__module__', '?')}.{short or target}")

    def _value(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._node(value)
        convert = _CONVERSIONS.get(type(value))
        if convert is not None:
            return convert(value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (torch.Size, tuple)):
            return Tuple([self._value(item) for item in value])
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if isinstance(value, slice):
            return Slice(self._value(value.start), self._value(value.stop), self._value(value.step))
        if isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                raise NotShippable("dictionary whose keys are no strings")
            return Mapping([self._value(part) for pair in value.items() for part in pair])
        raise NotShippable(f"argument of type {type(value).__name__}")

    def _node(self, node: fx.Node) -> Any:
        if node not in self._values and node.op == "get_attr":
            return self._encoder.part(_graph_of(node))
        return self._values[node]


_CONVERSIONS: dict[type, Callable[[Any], Any]] = {
    torch.dtype: lambda value: Named("dtype", str(value)[6:]),
    torch.layout: lambda value: Named("layout", str(value)[6:]),
    torch.memory_format: lambda value: Named("memory_format", str(value)[6:]),
    torch.device: lambda value: DeviceName(value.type),
    complex: lambda value: Complex(value.real, value.imag),
    type(...): lambda _: Ellipse(),
}


def _called_once_in(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield a graph and those that it calls once, whose steps become its own."""
    yield module
    for node in module.graph.nodes:
        target: Any = node.target
        if isinstance(target, HigherOrderOperator) and str(target) in _CALLS_ONCE:
            position, _ = _CALLS_ONCE[str(target)]
            yield from _called_once_in(_graph_of(node.args[position]))


def _tensors_of(module: fx.GraphModule) -> Iterator[tuple[fx.Node, torch.Tensor]]:
    for node in module.graph.nodes:
        value = _attribute(node) if node.op == "get_attr" else None
        if isinstance(value, torch.Tensor):
            yield node, value
        elif value is not None and not isinstance(value, fx.GraphModule):
            raise NotShippable(f"attribute {node.target} of type {type(value).__name__}")


def _graph_of(node: Any) -> fx.GraphModule:
    graph = _attribute(node) if isinstance(node, fx.Node) and node.op == "get_attr" else node
    if not isinstance(graph, fx.GraphModule):
        raise NotShippable(f"a call of a {type(graph).__name__} that is no graph")
    return graph


def _attribute(node: fx.Node) -> Any:
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _constant(value: torch.Tensor) -> Constant:
    with NoTorchFunction():
        plain = value.detach().contiguous()
        data = bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""
    return Constant(str(plain.dtype)[6:], tuple(plain.shape), data)


# Which steps of a graph may draw random numbers: programs with one carry the generator's state.

_RANDOM = names(
    """
    dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_
    feature_alpha_dropout feature_dropout feature_alpha_dropout_ feature_dropout_
    native_dropout rrelu rrelu_ rrelu_with_noise rrelu_with_noise_ rand randn randint
    randperm rand_like randn_like randint_like
    normal normal_ bernoulli bernoulli_ multinomial poisson uniform_ exponential_ random_
    cauchy_ geometric_ log_normal_ scaled_dot_product_attention multi_head_attention_forward
    lstm gru rnn_tanh rnn_relu gumbel_softmax fractional_max_pool2d fractional_max_pool3d
    binomial uniform kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_
    trunc_normal_ embedding_bag stochastic_depth _fused_dropout _sample_dirichlet
    _standard_gamma
    """
)


def draws(name: str, node: fx.Node) -> bool:
    """Whether the step may draw random numbers; a dropout in evaluation mode does not."""
    place = name.rpartition(":")[2]
    short = place.partition(".")[0] if "::" in name else place.rpartition(".")[2]
    if short not in _RANDOM:
        target = node.target  # torch says of some registered operators that they draw
        return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
    if short.startswith("scaled_dot_product"):
        return bool(argument(node, 4, "dropout_p", 0.0) != 0.0)
    if "dropout" in short and "native" not in short:
        return argument(node, 2, "training", default=True) is not False
    if short == "rrelu":
        return argument(node, 3, "training", default=False) is not False
    if short.startswith("rrelu_with_noise"):
        return argument(node, 4, "training", default=False) is not False
    if short == "multi_head_attention_forward":
        return (
            bool(node.kwargs.get("training", True)) and argument(node, 9, "dropout_p", 0.0) != 0.0
        )
    if short in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return _recurrent_draws(node)
    return short != "embedding_bag"


def _recurrent_draws(node: fx.Node) -> bool:
    """Between its layers, while it trains: the arguments `dropout, train` follow whole numbers."""
    at = next((number for number, value in enumerate(node.args) if type(value) is float), None)
    if at is None or at + 1 == len(node.args):
        return True  # given in another way
    return bool(node.args[at] != 0.0) and node.args[at + 1] is not False


def argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


# Calls of NumPy in a graph, which Dynamo replaces by calls of PyTorch's own NumPy.
#
# What depends on nothing but constants is computed once, here: it becomes a tensor of the program.

_MOST_CONSTANT_BYTES = 1 << 20  # of one: a program is sent to every worker that runs it


def _numpy_name_of(target: Any) -> str | None:
    """Return the name for a program of a function of NumPy, if this is one and takes no method."""
    if isinstance(target, utils.numpy_to_tensor_wrapper) and not numpy_draws(target):
        return f"n:{target.f.__name__}"
    if (
        isinstance(target, utils.numpy_operator_wrapper)
        and getattr(operator, target.op.__name__, None) is target.op
    ):
        return f"n:operator.{target.op.__name__}"
    return None


def _numpy_constants(module: fx.GraphModule) -> dict[fx.Node, torch.Tensor]:
    """Return the values of the nodes that compute with NumPy from constants alone."""
    values: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if _is_numpy(node) and all(used in values for used in node.all_input_nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return {
        node: value
        for node, value in values.items()
        if isinstance(value, torch.Tensor) and value.nbytes <= _MOST_CONSTANT_BYTES
    }


def _is_numpy(node: fx.Node) -> bool:
    target: Any = node.target
    if isinstance(target, utils.numpy_to_tensor_wrapper):
        return not numpy_draws(target)
    return (
        isinstance(target, (utils.numpy_method_wrapper, utils.numpy_operator_wrapper))
        or target is utils.numpy_attr_wrapper
    )


def numpy_draws(target: Any) -> bool:
    """Whether this draws random numbers: PyTorch's own NumPy does not draw what NumPy does."""
    function = getattr(target, "f", None)
    return str(getattr(function, "__module__", "")) == random.__name__
