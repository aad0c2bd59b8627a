"""Attention on CPUs under vmap: one kernel for all calls, with the numbers of single ones."""

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

from gpu_manager.worker.merging.merged_run import attention_rules

DRAWS = torch.Generator().manual_seed(7)  # by chance a mask could leave nothing to look at
Q, K, V = torch.randn(5, 2, 4, 7, 16), torch.randn(5, 2, 4, 9, 16), torch.randn(5, 2, 4, 9, 16)


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, attn_mask=m)


def causal(q: torch.Tensor) -> torch.Tensor:
    return attention(q, q, q, is_causal=True)


HEADS = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval().requires_grad_(False)
LAYER = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval().requires_grad_(False)
X = torch.randn(5, 2, 7, 16)


def heads(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = HEADS(x, x, x, need_weights=False)[0]
    return found


def weights(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = HEADS(x, y, y, need_weights=True)[1]
    return found


@pytest.mark.parametrize(
    ("compute", "inputs", "dims"),
    [
        (attention, (Q, K, V), (0, 0, 0)),
        (attention, (Q.movedim(0, 2), K, V), (2, 0, 0)),
        (attention, (Q, K[0], V[0]), (0, None, None)),
        (attention, (Q.bfloat16(), K.bfloat16(), V.bfloat16()), (0, 0, 0)),
        (causal, (Q,), (0,)),
        (masked, (Q, K, V, torch.randn(7, 9)), (0, 0, 0, None)),
        (masked, (Q, K, V, torch.randn(5, 7, 9)), (0, 0, 0, 0)),
        (masked, (Q, K, V, torch.randn(2, 1, 7, 9)), (0, 0, 0, None)),
        (masked, (Q, K, V, torch.rand(5, 2, 1, 7, 9, generator=DRAWS) > 0.2), (0, 0, 0, 0)),
        (masked, (Q, K, V, torch.rand(5, 1, 1, 1, 9, generator=DRAWS) > 0.2), (0, 0, 0, 0)),
        (heads, (X,), (0,)),
        (weights, (X, X[0]), (0, None)),
        (LAYER, (X,), (0,)),
        (masked, (Q[0], K[0], V[0], torch.randn(5, 7, 9)), (None, None, None, 0)),
    ],
)
def test_attention_gives_the_same_for_a_batch_of_calls(
    compute: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    dims: tuple[int | None, ...],
) -> None:
    attention_rules()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it calls a kernel for each
        found = torch.func.vmap(compute, in_dims=dims)(*inputs)
        pairs = list(zip(inputs, dims, strict=True))
        for number, each in enumerate(found):
            alone = [x if dim is None else x.select(dim, number) for x, dim in pairs]
            torch.testing.assert_close(each, compute(*alone))


def test_weights_of_attention_that_differ_are_refused() -> None:
    attention_rules()

    def own_weights(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        found = HEADS.in_proj_bias, HEADS.out_proj.weight, HEADS.out_proj.bias
        return torch._native_multi_head_attention(x, x, x, 16, 4, w, *found)[0]  # noqa: SLF001 - as modules do

    with torch.no_grad(), pytest.raises(RuntimeError, match="Batching rule"):
        torch.func.vmap(own_weights)(X, HEADS.in_proj_weight.expand(5, -1, -1))


def test_attention_with_its_weights_and_a_mask_is_refused() -> None:
    attention_rules()
    mask = torch.zeros(2, 7, dtype=torch.bool)
    with torch.no_grad(), pytest.raises(RuntimeError, match="Batching rule"):
        torch.func.vmap(lambda x: HEADS(x, x, x, mask, need_weights=False)[0])(X)


def test_attention_with_dropout_is_refused() -> None:
    attention_rules()
    with torch.no_grad(), pytest.raises(RuntimeError, match="random"):
        torch.func.vmap(lambda q: attention(q, q, q, dropout_p=0.5))(Q)
