"""Handles: the function's CUDA tensors, which are tensor subclasses with real CPU storage.

An operator on a handle runs natively on that storage, and its results become handles. `run` handles
every case; `CudaTensor.__torch_function__` handles the usual case at a tenth of the cost.
"""

from collections.abc import Callable, Iterator, Sequence
from inspect import getattr_static
from typing import Any, NoReturn

import torch

from torch_shim.errors import UnsupportedCall
from torch_shim.kernels import substitution
from torch_shim.patching import CPU, CUDA, names_cuda, seen_by_modes
from torch_shim.tensors import foreign_classes, mixed_devices, write_epochs
from torch_shim.tensors.absent_bytes import bring, run_absent, waiting
from torch_shim.tensors.dispatch import Operator, names, special
from torch_shim.tensors.foreign_classes import (
    brings_operators,
    cpu_class,
    known_handle_class,
    make_handle_class,
    running,
    set_cpu_class,
)

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
NoTorchFunction = torch._C.DisableTorchFunctionSubclass  # noqa: SLF001 - documented, kept there

_nowrap = torch.overrides.get_default_nowrap_functions
# What a program's class may have of its own, and handles answer all the same.
_OF_HANDLES = names(
    "__module__ __dict__ __weakref__ __doc__ __torch_function__ device is_cuda is_cpu get_device "
    "untyped_storage _typed_storage numpy __array__ __dlpack__ __dlpack_device__ "
    "__cuda_array_interface__ share_memory_ is_shared __init_subclass__"
)
# What handles answer without asking `__torch_function__`, since it is read very often.
_FACTS = {
    name: getattr_static(Tensor, name)
    for name in names("dim is_contiguous is_floating_point numel size stride dtype ndim shape")
}
# The methods below that function modes see, as they see torch's own; some call others.
_SEEN_BY_MODES = names(
    "get_device numpy __array__ __repr__ __format__ record_stream share_memory_ is_shared apply_ "
    "map_ untyped_storage"
)

# The classes of tensors that the shim treats as CPU tensors.
PLAIN = frozenset({Tensor, Parameter})
_AS_THEY_ARE = frozenset(
    {bool, int, float, complex, str, type(None), torch.Size, torch.dtype, torch.device}
)


class CudaTensor(Tensor):
    """A tensor that reports to be on the GPU."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Tell a program's class of those that it derives itself, but not of its handle class."""
        if cpu_class(cls) is cls:
            super().__init_subclass__(**options)

    @classmethod
    def __torch_function__(
        cls,
        func: Operator,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if len(types) > 1 and not _OF_TORCH.issuperset(types):
            if any(map(_is_asked_itself, types)):
                return NotImplemented
            kinds = foreign_classes.deciding(types, CudaTensor)
            if kinds:
                return _delegated(kinds, kinds, func, args, kwargs or {})
            refuse_mixed_devices(func, args, kwargs or {})
        if waiting:
            answer = run_absent(func, args, kwargs)
            if answer is not None:
                return answer
        handler = special[func]
        if handler is not None:
            return handler(func, args, kwargs or {})
        if kwargs:
            return run(func, args, kwargs)
        for argument in args:
            if type(argument) in PLAIN:
                return run(func, args, {})
        try:
            with NoTorchFunction():
                result = func(*args)
        except RuntimeError as error:
            result = substituted(error, func, args, {})
        kind = type(result)
        if kind is Tensor:
            result.__class__ = CudaTensor
            return result
        return result if kind in _AS_THEY_ARE else wrap(result)

    @property
    def device(self) -> torch.device:  # type: ignore[override] # a descriptor of C there
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override] # a descriptor of C there
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override] # a descriptor of C there
        return False

    def get_device(self) -> int:
        return 0

    def numpy(self, *, force: bool = False) -> Any:
        """Raise TypeError as for a CUDA tensor, unless forced."""
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, *_: object, **__: object) -> Any:
        return self.numpy()

    def __dlpack__(self, *_: object, **__: object) -> NoReturn:
        raise UnsupportedCall("Tensor.__dlpack__ of a CUDA tensor", "export tensor.cpu() instead")

    def __dlpack_device__(self) -> tuple[Any, int]:
        return (torch.utils.dlpack.DLDeviceType.kDLCUDA, 0)

    @property
    def __cuda_array_interface__(self) -> NoReturn:
        # An AttributeError makes hasattr() false: a CPU address must not be used as a GPU's.
        raise AttributeError("gpufaas: a redirected CUDA tensor has no address on a GPU")

    def __iter__(self) -> Iterator[Any]:
        if self.dim() == 0:
            raise TypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))

    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # type: ignore[override] # as in torch
        text = _text_of(self, tensor_contents)
        return "t" + text[1:] if text.startswith("Tensor(") else text

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def record_stream(self, stream: object) -> None:
        """Do nothing: all work runs in order, as on a single stream."""

    def share_memory_(self) -> "CudaTensor":
        """Do nothing, as for any CUDA tensor."""
        return self

    def is_shared(self) -> bool:
        """Return True, as for any CUDA tensor."""
        return True

    def apply_(self, *_: object) -> NoReturn:
        raise TypeError("apply_ is only implemented on CPU tensors")

    def map_(self, *_: object) -> NoReturn:
        raise TypeError("map_ is only implemented on CPU tensors")

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage, marked so that it reports to be on the GPU."""
        bring((self,))
        storage = write_epochs.storage_of(self)
        write_epochs.mark_storage(storage)
        return storage


class CudaParameter(CudaTensor, Parameter):
    """A module's parameter that reports to be on the GPU."""

    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # type: ignore[override] # as in torch
        alias = self.detach().requires_grad_(self.requires_grad)
        return "Parameter containing:\nt" + _text_of(alias, tensor_contents)[1:]


def _directly(native: Any) -> Any:
    """Wrap a method that returns no tensor, so that its result needs no check."""

    def method(self: CudaTensor, *args: Any, **kwargs: Any) -> Any:
        with NoTorchFunction():
            return native(self, *args, **kwargs)

    return method


def _directly_read(native: Any) -> Any:
    def read(self: CudaTensor) -> Any:
        with NoTorchFunction():
            return native.__get__(self)

    return property(read)


for _name, _native in _FACTS.items():
    setattr(CudaTensor, _name, (_directly if callable(_native) else _directly_read)(_native))
for _name in _SEEN_BY_MODES:
    setattr(CudaTensor, _name, seen_by_modes(getattr(CudaTensor, _name)))
CudaParameter.__repr__ = seen_by_modes(CudaParameter.__repr__)  # type: ignore[assignment, method-assign]

# Messages and printed tensors name the class; `tensor(` is as wide as `Tensor(`.
CudaTensor.__name__ = "Tensor"
CudaParameter.__name__ = "Parameter"

_CUDA_CLASS: dict[type, type] = {Tensor: CudaTensor, Parameter: CudaParameter}
_OF_TORCH = frozenset(_CUDA_CLASS.values())
for _kind, _handle_class in _CUDA_CLASS.items():
    set_cpu_class(_handle_class, _kind)


def _text_of(tensor: Tensor, contents: str | None) -> str:
    bring((tensor,))
    text: str = torch._tensor_str._str(tensor, tensor_contents=contents)  # type: ignore[no-untyped-call] # noqa: SLF001 - what torch calls
    return text


def run(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run any operator on handles, with named devices, mixed devices and nested results."""
    device = kwargs.get("device")
    if device is not None:
        if not names_cuda(device):
            with NoTorchFunction():
                return func(*args, **kwargs)
        kwargs = {**kwargs, "device": CPU}
    plain = [value for value in (*args, *kwargs.values()) if type(value) in PLAIN]
    if plain:
        refuse_mixed_devices(func, args, kwargs)
    try:
        with NoTorchFunction():
            result = func(*args, **kwargs)
    except RuntimeError as error:
        result = substituted(error, func, args, kwargs)
    if "out" in kwargs:
        write_epochs.note_all((kwargs["out"],))
    return wrap(result, {id(value) for value in plain})


def substituted(
    error: RuntimeError, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute what only CUDA has a kernel for; raise the CPU's error if it was right to refuse."""
    substitute = substitution.find(substitution.name_of(func), args, kwargs)
    if substitute is None:
        raise error
    with NoTorchFunction():
        return substitute(func, args, kwargs)


def run_anywhere(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator for which CUDA allows a mix of CPU and GPU tensors."""
    name = substitution.name_of(func)
    if not _made_by_autograd():
        mixed_devices.refuse(name, args, kwargs, _is_on_gpu)
    plain_ids = {id(value) for value in (*args, *kwargs.values()) if type(value) in PLAIN}
    with NoTorchFunction():
        result = func(*args, **kwargs)
    follows = name in mixed_devices.FIRST
    return result if follows and args and type(args[0]) in PLAIN else wrap(result, plain_ids)


def refuse_mixed_devices(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise CUDA's error if CPU tensors and handles among the arguments do not go together."""
    if not _made_by_autograd():
        mixed_devices.refuse(substitution.name_of(func), args, kwargs, _is_on_gpu)


def _is_on_gpu(tensor: Tensor) -> bool:
    # Subclasses of other libraries say themselves where they are.
    return tensor.is_cuda if type(tensor) not in PLAIN else False


def _made_by_autograd() -> bool:
    """Whether C++ may have created the tensors, in a backward pass, trace, transform or subclass.

    Such tensors are plain even if they belong on the GPU.
    """
    return (
        running.inside
        or torch._C._is_tracing()  # noqa: SLF001 - no public question
        or torch._C._current_graph_task_id() != -1  # noqa: SLF001 - no public question
        or torch._C._functorch.maybe_current_level() is not None  # noqa: SLF001 - see above
    )


def wrap(result: Any, plain_ids: set[int] | frozenset[int] = frozenset()) -> Any:
    """Make every tensor in a result a handle, except CPU tensors that were arguments."""
    kind = type(result)
    if kind in PLAIN:
        if id(result) not in plain_ids:
            result.__class__ = _CUDA_CLASS[kind]
    elif isinstance(result, (tuple, list)):
        for item in result:
            if type(item) not in _AS_THEY_ARE:  # as all the numbers of a list
                wrap(item, plain_ids)
    elif kind is dict:
        for item in result.values():
            wrap(item, plain_ids)
    return result


def _delegated(
    kinds: Sequence[type],
    types: Sequence[type],
    func: Operator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    given = (*args, *kwargs.values())
    plain_ids = {id(value) for value in mixed_devices.tensors_in(given) if type(value) in PLAIN}
    bring(given)
    try:
        result = foreign_classes.delegate(kinds, types, func, args, kwargs)
        return like_handles(wrap(result, plain_ids))
    finally:
        if foreign_classes.may_write(func, kwargs):
            write_epochs.note_all(given)


def like_handles(result: Any) -> Any:
    """Make handles of what another library's subclass made on a handle's storage."""
    if isinstance(result, list | tuple):
        for item in result:
            like_handles(item)
        return result
    kind = type(result)
    if isinstance(result, Tensor) and kind not in PLAIN and not brings_operators(kind):
        return become_cuda(result)
    return result


def become_cuda(tensor: Tensor) -> Tensor:
    """Change a tensor's class in place, so that the tensor reports to be on the GPU."""
    if type(tensor) is Tensor:
        tensor.__class__ = CudaTensor
    elif not isinstance(tensor, CudaTensor):
        _change_class(tensor, cuda_class(type(tensor)))
    return tensor


def become_cpu(tensor: Tensor) -> Tensor:
    """Change a tensor's class in place, so that the tensor reports to be on the CPU."""
    if isinstance(tensor, CudaTensor):
        _change_class(tensor, cpu_class(type(tensor)))
    return tensor


def cuda_class(kind: type) -> type:
    """Return the handle class for a tensor class; derive one for a user's subclass of Tensor."""
    handle_class = _CUDA_CLASS.get(kind) or known_handle_class(kind)
    return _derive(kind) if handle_class is None else handle_class


def _derive(kind: type) -> type:
    if brings_operators(kind):
        raise UnsupportedCall(
            f"moving a {kind.__qualname__} to the GPU",
            "it brings its own operators; convert it to a plain torch.Tensor first",
        )
    own = {name: getattr_static(kind, name) for name in _overrides(kind)}
    if foreign_classes.is_asked(kind):
        own = {**_FACTS, **own, "__torch_function__": classmethod(_leave_to(kind))}
    elif (
        foreign_classes.takes_part(kind)
        and not foreign_classes.decides(kind)
        and kind.__basicsize__ == Tensor.__basicsize__  # with slots no tensor can become of it
    ):
        own["__torch_function__"] = classmethod(_compute_as(kind))
    base = CudaParameter if issubclass(kind, Parameter) else CudaTensor
    return make_handle_class(base, kind, own)


def _overrides(kind: type) -> Iterator[str]:
    """Yield the methods of a program's class that go before those of handles."""
    for name in vars(CudaTensor):
        if name not in _OF_HANDLES:
            own, of_torch = getattr_static(kind, name, None), getattr_static(Tensor, name, None)
            if own is not of_torch:
                yield name


def _leave_to(kind: type) -> Callable[..., Any]:
    """Let a class with `__torch_function__` decide, as beside a CUDA tensor of torch's."""

    def decide(_: type, func: Operator, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kinds = (kind, *foreign_classes.deciding(types, CudaTensor))
        return _delegated(kinds, _asked(types), func, args, kwargs or {})

    return decide


def _compute_as(kind: type) -> Callable[..., Any]:
    """Compute as handles do, and give results the class, as `Tensor.__torch_function__` does."""

    def compute(cls: type, func: Operator, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(types) > 1 and not all(issubclass(kind, other) for other in _asked(types)):
            return NotImplemented
        if len(types) > 1:
            refuse_mixed_devices(func, args, kwargs or {})
        result = CudaTensor.__torch_function__(func, (), args, kwargs)
        if func not in _nowrap():
            given = mixed_devices.tensors_in((*args, *(kwargs or {}).values()))
            _give_class(result, cls, set(map(id, given)))
        return result

    return compute


def _asked(types: Any) -> tuple[type, ...]:
    """Return the classes that torch asks about an operator, as the program knows them."""
    kinds = dict.fromkeys(map(cpu_class, types))
    return tuple(kind for kind in kinds if kind is not Tensor and foreign_classes.takes_part(kind))


def _is_asked_itself(kind: type) -> bool:
    """Whether this is the handle class of a program's class that takes part in operators."""
    is_programs = kind not in _OF_TORCH and cpu_class(kind) is not kind
    return is_programs and "__torch_function__" in vars(kind)


def _give_class(result: Any, kind: type, given: set[int]) -> None:
    """Give results the class, but not the program's own tensors, which were given and written."""
    if type(result) is CudaTensor:
        if id(result) not in given:
            _change_class(result, kind)
    elif isinstance(result, list | tuple):
        for item in result:
            _give_class(item, kind, given)


def _change_class(tensor: Tensor, kind: type) -> None:
    # Assigned through object: a subclass may define its own __setattr__.
    object.__setattr__(tensor, "__class__", kind)
