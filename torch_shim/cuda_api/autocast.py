"""torch.autocast('cuda'): enabled for the CPU too, where the function's own arithmetic runs."""

from collections.abc import Callable
from typing import Any

import torch

from torch_shim.patching import replace
from torch_shim.redirected_device import tracing_fakes
from torch_shim.tensors.dispatch import Handler, Operator, names, special
from torch_shim.tensors.handles import CudaTensor, run

_SAVED = "_gpufaas_saved"
_NARROW = frozenset({torch.float16, torch.bfloat16})

# CUDA's list of operators that need the range of float32, and the functions of torch.nn.functional
# that consist of them.
_FLOAT32 = names(
    "__pow__ __rpow__ acos asin cdist cosh cosine_embedding_loss cosine_similarity cross_entropy "
    "cumprod cumsum dist erfinv exp expm1 group_norm hinge_embedding_loss huber_loss "
    "interpolate kl_div l1_loss layer_norm log log10 log1p log2 log_softmax logsumexp "
    "margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss native_layer_norm "
    "nll_loss norm normalize pdist poisson_nll_loss pow prod reciprocal renorm rsqrt sinh "
    "smooth_l1_loss soft_margin_loss softmax softmin softplus sum tan triplet_margin_loss upsample "
    "binary_cross_entropy_with_logits"
)


def install() -> None:
    """Make autocast('cuda') switch the CPU's autocast on entry and on exit as well."""
    replace(torch.autocast, "__enter__", _enter)
    replace(torch.autocast, "__exit__", _exit)
    special.classifiers.append(_classify)


def _enter(native: Callable[..., Any]) -> Callable[..., Any]:
    def enter(self: Any) -> Any:
        result = native(self)
        if self.device == "cuda" and not _elsewhere():
            # A stack: one instance used as a decorator may be entered again by a recursion.
            saved = self.__dict__.setdefault(_SAVED, [])
            saved.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            torch.set_autocast_enabled("cpu", torch.is_autocast_enabled("cuda"))
            torch.set_autocast_dtype("cpu", torch.get_autocast_dtype("cuda"))
        return result

    return enter


def _exit(native: Callable[..., Any]) -> Callable[..., Any]:
    def leave(self: Any, *reason: Any) -> Any:
        saved = self.__dict__.get(_SAVED)
        if saved:
            enabled, dtype = saved.pop()
            torch.set_autocast_enabled("cpu", enabled)
            torch.set_autocast_dtype("cpu", dtype)
        return native(self, *reason)

    return leave


def in_float32(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run in float32 an operator that only CUDA's autocast, not the CPU's, runs in float32."""
    if torch.is_autocast_enabled("cuda"):
        args = tuple(map(_widened, args))
        kwargs = {name: _widened(value) for name, value in kwargs.items()}
    return run(func, args, kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, CudaTensor) and value.dtype in _NARROW:
        return value.float()
    return value


def _classify(operator: Operator) -> Handler | None:
    return in_float32 if getattr(operator, "__name__", "") in _FLOAT32 else None


def _elsewhere() -> bool:
    return torch.compiler.is_dynamo_compiling() or tracing_fakes()
