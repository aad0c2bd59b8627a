"""The names that programs use for the functions in captured graphs."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from torch_shim.patching import original_of

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
    "torch.autograd.grad_mode._enter_inference_mode",
    "torch.autograd.grad_mode._exit_inference_mode",
)


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
