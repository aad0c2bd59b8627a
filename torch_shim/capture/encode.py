"""Encodes a graph that Dynamo captured as a program, or states why that is not possible."""

import builtins
import math
import operator
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from torch_shim.patching import original_of
from torch_shim.tensors.handles import NoTorchFunction
from torch_shim.wire.programs import (
    Complex,
    Constant,
    DeviceName,
    Ellipse,
    Mapping,
    Named,
    Program,
    ProgramStep,
    Ref,
    Slice,
    Tuple,
)


class NotShippable(Exception):
    """A graph contains something that a program cannot express."""


# The namespaces of the functions in captured graphs; a program uses the first name found.
_NAMESPACES = (
    "torch.nn.functional",
    "torch",
    "torch.linalg",
    "torch.fft",
    "torch.special",
    "torch.functional",
    "torch.nn.init",
    "torch._C._nn",
    "torch._C._linalg",
    "torch._C._fft",
    "torch._C._special",
    "torch._VF",
    "torch.amp.autocast_mode",
    "torch._C",
    "torch._C._functorch",
    "torch._functorch.predispatch",
    "torch._functorch.vmap",
    "torch.fx.experimental.symbolic_shapes",
    "torch._assert",
)
_RANDOM = frozenset(
    [
        "dropout",
        "dropout_",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "alpha_dropout_",
        "feature_alpha_dropout",
        "feature_dropout",
        "feature_alpha_dropout_",
        "feature_dropout_",
        "native_dropout",
        "rrelu",
        "rrelu_",
        "rand",
        "randn",
        "randint",
        "randperm",
        "rand_like",
        "randn_like",
        "randint_like",
        "normal",
        "normal_",
        "bernoulli",
        "bernoulli_",
        "multinomial",
        "poisson",
        "uniform_",
        "exponential_",
        "random_",
        "cauchy_",
        "geometric_",
        "log_normal_",
        "scaled_dot_product_attention",
        "multi_head_attention_forward",
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
        "gumbel_softmax",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "binomial",
        "uniform",
        "kaiming_uniform_",
        "kaiming_normal_",
        "xavier_uniform_",
        "xavier_normal_",
        "trunc_normal_",
        "embedding_bag",
        "stochastic_depth",
        "_fused_dropout",
        "_sample_dirichlet",
        "_standard_gamma",
    ]
)
_NO_OPERATORS = frozenset({"_log_api_usage_once"})


def encode(module: fx.GraphModule) -> Program:
    """Return the program that computes what `module` does; NotShippable states the obstacle."""
    return _Encoder(module).program()


class FunctionNames:
    """The names of the torch functions that a graph may call, looked up by object identity."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        for path in _NAMESPACES:
            space = _resolve(path)
            if isinstance(space, (ModuleType, type)):
                for name, value in _members(space):
                    self._remember(value, f"{path}.{name}")
            elif space is not None:
                self._remember(space, path)

    def of(self, target: object) -> str | None:
        """Return the dotted name; None for a function that is not torch's."""
        name = self._names.get(id(target))
        return name if name is not None else self._names.get(id(original_of(target)))

    def _remember(self, value: object, name: str) -> None:
        if callable(value) and not isinstance(value, type):
            self._names.setdefault(id(value), name)
            self._names.setdefault(id(original_of(value)), name)


class _Encoder:
    """Encodes one graph."""

    names: FunctionNames | None = None

    def __init__(self, module: fx.GraphModule) -> None:
        if _Encoder.names is None:
            _Encoder.names = FunctionNames()
        self._names = _Encoder.names
        self._module = module
        self._numbers: dict[fx.Node, int] = {}
        self._first_step = 0
        self._constants: list[Constant] = []
        self._steps: list[ProgramStep] = []
        self._random = False

    def program(self) -> Program:
        nodes = list(self._module.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        fetched = [node for node in nodes if node.op == "get_attr"]
        self._first_step = len(inputs) + len(fetched)
        for number, node in enumerate(inputs + fetched):
            self._numbers[node] = number
        self._constants = [self._constant(node) for node in fetched]
        output: Any = None
        for node in nodes:
            if node.op in ("call_function", "call_method"):
                self._call(node)
            elif node.op == "output":
                output = self._value(node.args[0])
            elif node.op == "call_module":
                raise NotShippable(f"module {node.target}")
        return Program(
            len(inputs), tuple(self._constants), tuple(self._steps), output, self._random
        )

    def _call(self, node: fx.Node) -> None:
        name = self._operator(node)
        if name.rpartition(".")[2] in _NO_OPERATORS:
            return
        self._random = self._random or _draws(name, node)
        arguments = [self._value(argument) for argument in node.args]
        named = {str(key): self._value(value) for key, value in node.kwargs.items()}
        self._numbers[node] = self._first_step + len(self._steps)
        self._steps.append(ProgramStep(name, arguments, named))

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
            raise NotShippable(f"higher-order operator {target}")
        return self._function(target)

    def _function(self, target: Any) -> str:
        name = self._names.of(target)
        if name is not None:
            return f"t:{name}"
        short = getattr(target, "__name__", "")
        if getattr(target, "__module__", "") == "torch._refs" and hasattr(torch, short):
            return f"t:torch.{short}"  # the Python implementation of the same function
        for letter, space in (("o", operator), ("M", math), ("b", builtins)):
            if getattr(space, short, None) is target:
                return f"{letter}:{short}"
        owner = getattr(target, "__objclass__", None)
        if owner is not None and issubclass(torch.Tensor, owner):
            return f"m:{short}"
        raise NotShippable(f"function {getattr(target, '__module__', '?')}.{short or target}")

    def _constant(self, node: fx.Node) -> Constant:
        value: Any = self._module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            raise NotShippable(f"attribute {node.target} of type {type(value).__name__}")
        with NoTorchFunction():
            plain = value.detach().contiguous()
            data = bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""
        return Constant(str(plain.dtype)[6:], tuple(plain.shape), data)

    def _value(self, value: Any) -> Any:
        convert = _CONVERSIONS.get(type(value))
        if convert is not None:
            return convert(self, value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (torch.Size, tuple)):
            return Tuple([self._value(item) for item in value])
        if isinstance(value, list):
            return [self._value(item) for item in value]
        if isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                raise NotShippable("dictionary whose keys are no strings")
            return Mapping([self._value(part) for pair in value.items() for part in pair])
        raise NotShippable(f"argument of type {type(value).__name__}")

    def _node(self, node: fx.Node) -> Ref:
        return Ref(self._numbers[node])

    def _slice(self, value: slice) -> Slice:
        return Slice(self._value(value.start), self._value(value.stop), self._value(value.step))


_CONVERSIONS: dict[type, Callable[[_Encoder, Any], Any]] = {
    fx.Node: lambda encoder, node: encoder._node(node),  # noqa: SLF001 - a table of its methods
    slice: lambda encoder, value: encoder._slice(value),  # noqa: SLF001 - a table of its methods
    torch.dtype: lambda _, value: Named("dtype", str(value)[6:]),
    torch.layout: lambda _, value: Named("layout", str(value)[6:]),
    torch.memory_format: lambda _, value: Named("memory_format", str(value)[6:]),
    torch.device: lambda _, value: DeviceName(value.type),
    complex: lambda _, value: Complex(value.real, value.imag),
    type(...): lambda _, __: Ellipse(),
}


def _draws(name: str, node: fx.Node) -> bool:
    """Whether the step may draw random numbers; a dropout in evaluation mode does not."""
    short = name.rpartition(":")[2].rpartition(".")[2]
    if short not in _RANDOM and not (short == "default" and "dropout" in name):
        return False
    if short.startswith("scaled_dot_product"):
        return bool(argument(node, 4, "dropout_p", 0.0) != 0.0)
    if "dropout" in short and "native" not in short:
        return argument(node, 2, "training", default=True) is not False
    if short == "rrelu":
        return argument(node, 3, "training", default=False) is not False
    if short == "multi_head_attention_forward":
        return (
            bool(node.kwargs.get("training", True)) and argument(node, 9, "dropout_p", 0.0) != 0.0
        )
    if short in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return True
    return short != "embedding_bag"


def argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    """Return the value that a call passes for one parameter, by position or name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def _resolve(path: str) -> Any:
    value: Any = torch
    for part in path.split(".")[1:]:
        value = getattr(value, part, None)
    return value


def _members(space: object) -> Iterator[tuple[str, Any]]:
    for name in dir(space):
        value = getattr(space, name, None)
        if value is not None:
            yield name, value
