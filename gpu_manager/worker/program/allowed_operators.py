"""Which operators a program may name, and what they stand for: a closed list.

It is made of the operators that `reviewed_operators.py` names, wherever torch has them, and of the
helpers that Dynamo puts into graphs.
"""

import builtins
import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import get_overridable_functions

import torch_shim.kernels.padded_encoder  # noqa: F401 - it registers the operator
from gpu_manager.worker.program import replacements
from gpu_manager.worker.program.argument_checks import checked
from gpu_manager.worker.program.plain_values import bounded
from gpu_manager.worker.program.replacements import Replacements
from gpu_manager.worker.program.reviewed_operators import OF_LIBRARIES, is_reviewed
from gpu_manager.worker.program.written_tensors import noting_writes, operator_at

Operator = Callable[..., Any]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Methods that torch's table of overridable functions leaves out.
_MORE_METHODS = _words(
    "new_empty new_empty_strided new_full new_ones new_tensor new_zeros stride unflatten "
    "_is_all_true _is_any_true"
)
# Functions that torch's table leaves out because no argument of theirs decides who handles them.
_MORE_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "torch": _words(
        """arange as_strided as_tensor asarray bartlett_window blackman_window can_cast empty
    empty_permuted empty_strided eye fill full hamming_window hann_window is_tensor kaiser_window
    linspace logspace normal ones promote_types rand rand_like randint randint_like randn
    randn_like randperm range result_type scalar_tensor sym_constrain_range
    sym_constrain_range_for_size sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt
    sym_sum _sym_sqrt _sym_acos _sym_asin _sym_atan _sym_cos _sym_cosh _sym_sin _sym_sinh _sym_tan
    _sym_tanh _sym_log2 tensor tril_indices triu_indices vander zeros _assert _assert_async _check
    _check_is_size is_grad_enabled is_inference_mode_enabled _functional_sym_constrain_range
    _shape_as_tensor _weight_norm _cast_Half _cast_Float _fused_rms_norm native_layer_norm
    conv_tbc _assert_tensor_metadata broadcast_shapes"""
    ),
    "torch.functional": _words("broadcast_shapes"),
    "torch.fft": _words("fftfreq rfftfreq"),
    "torch.nn.functional": _words(
        """hardsigmoid hardswish sigmoid tanh upsample upsample_bilinear upsample_nearest
    _canonical_mask"""
    ),
    "torch.nn.init": _words(
        """constant_ eye_ dirac_ kaiming_normal_ kaiming_uniform_ normal_ ones_ orthogonal_
    trunc_normal_
    uniform_ xavier_normal_ xavier_uniform_ zeros_"""
    ),
    "torch.autograd.graph": _words("increment_version"),
}
# Modules with functions of tensors that the same table has, and modules that it leaves out.
_TABLE_NAMESPACES = _words(
    """torch torch.functional torch.nn.functional torch.nn.init torch.linalg torch.fft
    torch.special"""
)
_NATIVE_NAMESPACES = _words("torch._C._nn torch._C._linalg torch._C._fft torch._C._special")

_OPERATOR_FUNCTIONS = _words(
    """abs add and_ concat contains eq floordiv ge getitem gt iadd iand iconcat ifloordiv ilshift
    imatmul imod imul index inv invert ior ipow irshift is_ is_not isub itruediv ixor le lshift lt
    matmul mod mul ne neg not_ or_ pos pow rshift setitem sub truediv truth xor"""
)
_BUILTINS = _words("abs bool complex divmod float int len max min pow round sum")
_MATH = _words(
    """acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh degrees dist erf erfc exp expm1
    fabs floor fmod frexp fsum gamma gcd hypot isclose isfinite isinf isnan isqrt lcm ldexp lgamma
    log log10 log1p log2 modf pow prod radians remainder sin sinh sqrt tan tanh trunc"""
)
_ATTRIBUTES = _words(
    """H T device dtype imag is_leaf is_meta is_mps is_nested is_quantized is_sparse is_xla is_xpu
    itemsize layout mH mT names nbytes ndim real requires_grad shape values indices eigenvalues
    eigenvectors Q R L U S Vh LU pivots sign logabsdet solution residuals rank singular_values
    hist bin_edges mantissa exponent counts inverse_indices P X min max eps tiny smallest_normal
    resolution bits"""
)


class OperatorTable:
    """Every operator that programs may name. Made once in a process, for one device."""

    def __init__(self, device: torch.device) -> None:
        replaced = Replacements(device)
        self._adapted = replaced.on_emulated_gpu
        named = {**_common(), **_checked(replaced.table())}
        self._named = {name: self._adapted(name, found) for name, found in named.items()}
        self.device = device
        self._registered: dict[str, Operator] = {}

    def find(self, name: str) -> Operator | None:
        """What the name stands for, or None if no program may name it."""
        operator = self._named.get(name)
        if operator is None and name.startswith("a:"):
            operator = self._registered.get(name)
            if operator is None:
                operator = self._overload(name[2:])
                if operator is not None:
                    operator = self._adapted(name, _checked_one(name, operator))
                    self._registered[name] = operator
        return operator

    def names(self) -> list[str]:
        """Every name; of registered operators that with the name of the overload."""
        registered = (f"a:{name}" for name in _registered_names() if "." in name)
        findable = {name for name in registered if self.find(name) is not None}
        return sorted({*self._named, *findable})

    def _overload(self, name: str) -> Operator | None:
        """A registered operator: `aten::add.Tensor`, or `aten::add` for whichever fits."""
        namespace, _, rest = name.partition("::")
        short, _, overload = rest.partition(".")
        if not _is_allowed(namespace, short):
            return None
        if name not in _registered_names():
            _registered_names.cache_clear()  # a library may have been loaded since
            if name not in _registered_names():
                return None
        packet = getattr(getattr(torch.ops, namespace), short, None)
        if not overload:
            return packet
        operator = getattr(packet, overload, None)
        return None if operator is None or _is_unusual(operator) else operator


def preload() -> None:
    """Make the part of the table that all devices share, in the process that forks workers."""
    _common()


@functools.cache
def _common() -> dict[str, Operator]:
    listed = {**dict(_listed()), **dict(_functions()), **dict(_methods())}
    return (
        _checked({**listed, **dict(replacements.numpy_table())}) | replacements.higher_order_table()
    )


def _checked(operators: dict[str, Operator]) -> dict[str, Operator]:
    return {name: _checked_one(name, found) for name, found in operators.items()}


def _checked_one(name: str, operator: Operator) -> Operator:
    return bounded(name, noting_writes(name, checked(name, operator)))


def _is_allowed(namespace: str, short: str) -> bool:
    return is_reviewed(short) if namespace == "aten" else short in OF_LIBRARIES.get(namespace, ())


def _is_unusual(overload: torch._ops.OpOverload) -> bool:
    """Overloads that no graph has: those with an output that is given, or named dimensions.

    A schema shows names of dimensions as plain text: the overload's own name tells of them.
    """
    schema = overload._schema  # noqa: SLF001 - torch has no public way to ask
    has_names = "name" in schema.overload_name.lower()
    return has_names or any(argument.is_out for argument in schema.arguments)


@functools.cache
def _registered_names() -> frozenset[str]:
    """Every operator that torch's dispatcher knows, with and without the name of its overload."""
    names = torch._C._dispatch_get_all_op_names()  # noqa: SLF001 - torch has no public list
    full = {name if "." in name else f"{name}.default" for name in names}
    return frozenset(full) | {name.partition(".")[0] for name in names}


def _listed() -> Iterator[tuple[str, Operator]]:
    for name in _OPERATOR_FUNCTIONS:
        yield f"o:{name}", getattr(operator, name)
    for name in _BUILTINS:
        yield f"b:{name}", getattr(builtins, name)
    for name in _MATH:
        yield f"M:{name}", getattr(math, name)
    for name in _ATTRIBUTES:
        yield f"g:{name}", _attribute(name)
    for path, names in _MORE_FUNCTIONS.items():
        space = operator_at(path)
        for name in names:
            value = getattr(space, name, None)
            if value is not None:
                yield f"t:{path}.{name}", value


def _attribute(name: str) -> Operator:
    """Reads the attribute, which is a value: of what is a method on tensors, only another's."""
    getter = operator.attrgetter(name)
    if not callable(getattr(torch.Tensor, name, None)):
        return getter

    def read(value: Any) -> Any:
        found = getter(value)
        if callable(found):
            raise TypeError(f"{name} is a method")
        return found

    return read


def _functions() -> Iterator[tuple[str, Operator]]:
    table = get_overridable_functions()
    listed = {id(function) for functions in table.values() for function in functions}
    for path in _TABLE_NAMESPACES:
        space = operator_at(path)
        for name in filter(is_reviewed, dir(space)):
            function = getattr(space, name)
            if id(function) in listed:
                yield f"t:{path}.{name}", function
    for name in filter(is_reviewed, dir(torch._C._VariableFunctions)):  # noqa: SLF001 - in C++
        if hasattr(torch, name):
            yield f"t:torch.{name}", getattr(torch, name)
    for path in _NATIVE_NAMESPACES:
        space = operator_at(path)
        for name in filter(is_reviewed, dir(space)):
            yield f"t:{path}.{name}", getattr(space, name)


def _methods() -> Iterator[tuple[str, Operator]]:
    for listed in get_overridable_functions()[torch.Tensor]:
        name = getattr(listed, "__name__", "__get__")
        found = getattr(torch.Tensor, name, None)
        if found is listed and is_reviewed(name):
            yield f"m:{name}", found
    for name in _MORE_METHODS:
        found = getattr(torch.Tensor, name, None)
        if found is not None:
            yield f"m:{name}", found
