"""Attention on CPUs under vmap: one kernel for all calls, with the numbers of single ones."""

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

from gpu_manager.worker.merging.attention_rule import attention_rule

Q, K, V = torch.randn(5, 2, 4, 7, 16), torch.randn(5, 2, 4, 9, 16), torch.randn(5, 2, 4, 9, 16)


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, attn_mask=m)


def causal(q: torch.Tensor) -> torch.Tensor:
    return attention(q, q, q, is_causal=True)


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
        (masked, (Q, K, V, torch.rand(5, 2, 1, 7, 9) > 0.2), (0, 0, 0, 0)),
        (masked, (Q, K, V, torch.rand(5, 1, 1, 1, 9) > 0.2), (0, 0, 0, 0)),
        (masked, (Q[0], K[0], V[0], torch.randn(5, 7, 9)), (None, None, None, 0)),
    ],
)
def test_attention_gives_the_same_for_a_batch_of_calls(
    compute: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    dims: tuple[int | None, ...],
) -> None:
    attention_rule()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it calls a kernel for each
        found = torch.func.vmap(compute, in_dims=dims)(*inputs)
        pairs = list(zip(inputs, dims, strict=True))
        for number, each in enumerate(found):
            alone = [x if dim is None else x.select(dim, number) for x, dim in pairs]
            torch.testing.assert_close(each, compute(*alone))


def test_attention_with_dropout_is_refused() -> None:
    attention_rule()
    with torch.no_grad(), pytest.raises(RuntimeError, match="random"):
        torch.func.vmap(lambda q: attention(q, q, q, dropout_p=0.5))(Q)
