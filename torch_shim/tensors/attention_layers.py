"""Attention layers take in a graph, and with handles, the path that they take in plain PyTorch.

In evaluation without gradients `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` compute
with one fused operator, and `nn.TransformerEncoder` leaves padding out. They do not where an
argument has a `__torch_function__`, as handles have, nor, the first and the last, where they are
traced. The numbers of the other path differ: padded positions are not zero there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import activation

from torch_shim.kernels.padded_encoder import padded_encoder
from torch_shim.patching import redirect
from torch_shim.tensors.handles import CudaTensor, NoTorchFunction, become_cuda

Forward = Callable[..., Any]

_BATCHED = 3  # dimensions: batch, sequence, features
_OPERATOR = padded_encoder._opoverload  # noqa: SLF001 - the operator as graphs hold it

# The encoder's forward, kept out of graphs; set once Dynamo has been imported.
_untraced: list[Forward] = []


def install() -> None:
    """Let the layers run as one operator on handles in evaluation."""
    for kind in (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder):
        redirect(kind, "forward", _step_aside)
    redirect(nn.TransformerEncoder, "forward", _encode)


def follow_in_traces() -> None:
    """Let Dynamo trace the same path; called once it has been imported."""
    from torch._dynamo.variables.torch import tracing_state_functions  # noqa: PLC0415 - see above

    tracing_state_functions()[activation._is_make_fx_tracing] = False  # noqa: SLF001 - Dynamo's table
    _untraced.append(torch.compiler.disable(nn.TransformerEncoder.forward))  # type: ignore[no-untyped-call] # torch leaves it untyped


def _step_aside(native: Forward, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a layer's forward, which in evaluation sees CPU tensors where it is given handles."""
    is_tracing = torch.compiler.is_dynamo_compiling()
    if is_tracing or self.training or not _has_only_handles((*args, *kwargs.values())):
        return native(self, *args, **kwargs)
    with NoTorchFunction():
        result = native(self, *args, **kwargs)
    for value in result if isinstance(result, tuple) else (result,):
        if isinstance(value, torch.Tensor):
            become_cuda(value)
    return result


def _has_only_handles(values: tuple[Any, ...]) -> bool:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    plain = any(not isinstance(value, CudaTensor) or value.is_nested for value in tensors)
    return bool(tensors) and not plain and not torch._C._is_tracing()  # noqa: SLF001 - torch.jit.is_tracing


def _encode(
    native: Forward,
    self: nn.TransformerEncoder,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,  # noqa: FBT001 - as torch has it
) -> Any:
    """Run the encoder's forward, which leaves padding out in a graph too."""
    is_tracing = torch.compiler.is_dynamo_compiling()
    if not is_tracing or not _leaves_padding_out(self, src, mask, src_key_padding_mask):
        return native(self, src, mask, src_key_padding_mask, is_causal)
    if not _is_one_operator(self):
        return _untraced[0](self, src, mask, src_key_padding_mask, is_causal)
    # The mask as numbers that are added to the scores, as torch's module has it.
    padding = nn.functional._canonical_mask(  # noqa: SLF001 - as torch's module does
        mask=src_key_padding_mask,
        mask_name="src_key_padding_mask",
        other_type=None,
        other_name="mask",
        target_type=src.dtype,
    )
    first = self.layers[0]
    output = _OPERATOR(
        src,
        padding,
        getattr(self, "mask_check", True),
        *_numbers(first),
        [weight for layer in self.layers for weight in _weights(layer)],
    )
    return output if self.norm is None else self.norm(output)


def _leaves_padding_out(
    encoder: nn.TransformerEncoder,
    src: torch.Tensor,
    mask: torch.Tensor | None,
    padding: torch.Tensor | None,
) -> bool:
    """Whether plain PyTorch computes with a nested tensor if the mask's values allow it."""
    first = encoder.layers[0]
    return (
        padding is not None
        and mask is None
        and src.device.type == "cuda"
        and src.dim() == _BATCHED
        and torch.backends.mha.get_fastpath_enabled()
        and getattr(encoder, "use_nested_tensor", False)
        and not first.training
        and not torch.is_autocast_enabled()
        and not _records_gradients((src, *_weights(first)))
    )


def _is_one_operator(encoder: nn.TransformerEncoder) -> bool:
    expected = _numbers(encoder.layers[0])
    return all(
        _is_fused(layer) and _numbers(layer) == expected and not _records_gradients(_weights(layer))
        for layer in encoder.layers
    )


def _is_fused(layer: nn.Module) -> bool:
    if type(layer) is not nn.TransformerEncoderLayer or "forward" in vars(layer):
        return False
    attention = layer.self_attn
    return (
        not layer.training
        and not layer.norm_first
        and bool(layer.activation_relu_or_gelu)
        and attention.batch_first
        and attention._qkv_same_embed_dim  # noqa: SLF001 - as torch's module does
        and attention.num_heads % 2 == 0
        and layer.norm1.eps == layer.norm2.eps
        and all(weight is not None for weight in _weights(layer))
        and not any(part._forward_hooks or part._forward_pre_hooks for part in layer.modules())  # noqa: SLF001 - as torch's module does
    )


def _records_gradients(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )


def _numbers(layer: Any) -> tuple[int, bool, float]:
    return layer.self_attn.num_heads, layer.activation_relu_or_gelu == 2, layer.norm1.eps  # noqa: PLR2004 - torch's number for GELU


def _weights(layer: Any) -> tuple[torch.Tensor | None, ...]:
    """Return a layer's weights in the order of `torch._transformer_encoder_layer_fwd`."""
    attention = layer.self_attn
    parts = (attention.out_proj, layer.norm1, layer.norm2, layer.linear1, layer.linear2)
    pairs = [weight for part in parts for weight in (part.weight, part.bias)]
    return (attention.in_proj_weight, attention.in_proj_bias, *pairs)
