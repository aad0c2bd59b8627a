"""Shows Dynamo a program's tensor classes, which have handle classes in the program's process.

Dynamo follows such a class as torch does: its `__torch_function__`, methods and properties stand
in the trace, and outputs become of the class after the graph has run.
"""

from collections.abc import Callable
from functools import partial
from inspect import getattr_static
from types import FunctionType
from typing import Any

import torch
from torch._dynamo import utils
from torch._dynamo.variables import builder, torch_function
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch_function import TensorWithTFOverrideVariable

from torch_shim.capture.traces.dynamo_settings import end_graph, traces
from torch_shim.patching import CUDA, redirect
from torch_shim.tensors import foreign_classes
from torch_shim.tensors.dispatch import names
from torch_shim.tensors.foreign_classes import cpu_class
from torch_shim.tensors.handles import PLAIN, CudaParameter, CudaTensor, NoTorchFunction

Native = Callable[..., Any]

_OF_TORCH = frozenset({CudaTensor, CudaParameter})
_OF_HANDLES = names("device is_cuda is_cpu")  # which no program's class answers
# What a class may have of its own beside operators such as `__add__`, which Dynamo ignores.
_NO_OPERATORS = names(
    "__annotations__ __deepcopy__ __dict__ __dir__ __doc__ __firstlineno__ __format__ __init__ "
    "__init_subclass__ __module__ __new__ __reduce__ __reduce_ex__ __repr__ __setstate__ __slots__ "
    "__static_attributes__ __str__ __torch_function__ __weakref__"
)


def install() -> None:
    """Let `type(x)` and `x.__class__` be the program's class in traces, and `x.device` the GPU."""
    redirect(builder, "infer_subclass_type", _class_to_dynamo)
    redirect(utils, "to_subclass", _to_subclass)
    redirect(torch_function, "call_torch_function", _call_function_of_class)
    redirect(BuiltinVariable, "call_type", _call_type)
    redirect(builder.VariableBuilder, "wrap_tensor", _wrap_tensor)
    kind = TensorWithTFOverrideVariable
    name = "tp_getattro_impl" if hasattr(kind, "tp_getattro_impl") else "var_getattr"
    redirect(kind, name, partial(_read, getattr(TensorVariable, name)))


def _class_to_dynamo(native: Native, value: Any) -> Any:
    """Return the class that Dynamo follows; None for a plain tensor."""
    if not isinstance(value, CudaTensor):
        return native(value)
    kind = cpu_class(type(value))
    if has_operators(value):
        why = f"Dynamo does not call the operators of {kind.__qualname__}."
        remedy = "Define __torch_function__ instead of operators such as __add__."
        end_graph("Tensor class with operators of its own", kind.__qualname__, why, remedy)
    return None if kind in PLAIN else kind


def _to_subclass(native: Native, value: Any, kind: type) -> Any:
    """Give an output its class, unless it is an input of this class that the graph wrote to."""
    return value if cpu_class(type(value)) is kind else native(value, kind)


def _call_function_of_class(native: Native, *args: Any, **options: Any) -> Any:
    """Trace a class's `__torch_function__`, in which operators ask the class again, as in C++."""
    if traces.ours:
        options.pop("is_subclass_dispatch", None)  # Dynamo's word for asking no class inside of it
    return native(*args, **options)


def has_operators(value: Any) -> bool:
    """Whether this is a GPU tensor of a class that Dynamo cannot follow, for its operators."""
    if not isinstance(value, CudaTensor) or type(value) in _OF_TORCH:
        return False
    kind = cpu_class(type(value))
    if kind is type(value):  # derived from the class of plain GPU tensors
        return True
    own = kind.__mro__[: kind.__mro__.index(torch.Tensor)]
    defined = {name for base in own if base is not torch.nn.Parameter for name in vars(base)}
    special = {name for name in defined if name[:2] == "__" and hasattr(torch.Tensor, name)}
    return bool(special - _NO_OPERATORS) or "__getattr__" in defined


def _call_type(native: Native, self: Any, tx: Any, variable: Any) -> Any:
    if isinstance(variable, TensorWithTFOverrideVariable):
        return variable.class_type_var(tx)
    return native(self, tx, variable)


def _wrap_tensor(native: Native, self: Any, value: Any) -> Any:
    """Let no class see what Dynamo reads of its tensors: what the class notes may be guarded."""
    if not (traces.ours and foreign_classes.is_asked(cpu_class(type(value)))):
        return native(self, value)
    with NoTorchFunction():
        return native(self, value)


def _read(of_plain: Native, native: Native, self: Any, tx: Any, name: str) -> Any:
    if name == "__class__":
        return self.class_type_var(tx)
    of_handles = name in _OF_HANDLES and self.device == CUDA
    if of_handles or _is_torch_s_function(self.class_type, name):
        return of_plain(self, tx, name)
    return native(self, tx, name)


def _is_torch_s_function(kind: type, name: str) -> bool:
    """Whether a method is in Python, which Dynamo takes for a property of such a class."""
    method = getattr_static(torch.Tensor, name, None)
    return isinstance(method, FunctionType) and getattr_static(kind, name) is method
