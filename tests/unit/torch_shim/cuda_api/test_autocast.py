"""Autocast on the GPU, for the function's own arithmetic."""

import pytest

from tests.kit.programs.snippets import Snippet

_PLAIN = "h = torch.ones(4, 4).cuda()\n"


def test_autocast_chooses_dtypes_as_cuda_does_when_entered(shim: Snippet) -> None:
    shim(
        _PLAIN
        + """
F = torch.nn.functional
with torch.autocast("cuda"):
    half = h @ h
    assert half.dtype == torch.float16 and torch.is_autocast_enabled()
    assert torch.get_autocast_dtype("cuda") == torch.float16
    assert torch.nn.Linear(4, 4).cuda()(h).dtype == torch.float16
    assert half.relu().dtype == torch.float16
    for result in (
        F.softmax(half, -1), F.layer_norm(half, (4,)), half.exp(), half.sum(), half.pow(2),
        F.cross_entropy(half, torch.zeros(4, dtype=torch.long).cuda()), half**2, half.norm(),
        F.mse_loss(half, half),
    ):
        assert result.dtype == torch.float32
    with torch.autocast("cuda", enabled=False):
        assert (h @ h).dtype == torch.float32 and not torch.is_autocast_enabled()
        assert half.exp().dtype == torch.float16
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (h @ h).dtype == torch.bfloat16
    assert (h @ h).dtype == torch.float16
assert (h @ h).dtype == torch.float32 and not torch.is_autocast_enabled()
"""
    )


def test_autocast_of_the_cpu_is_restored_when_left(shim: Snippet) -> None:
    shim("""
    with torch.autocast("cpu", dtype=torch.float16):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
    try:
        with torch.autocast("cuda"):
            raise KeyError
    except KeyError:
        assert not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")
    """)


@pytest.mark.parametrize(
    "context", ['torch.autocast("cuda")', 'torch.amp.autocast("cuda")', "torch.cuda.amp.autocast()"]
)
def test_autocast_works_when_it_decorates_a_recursion(shim: Snippet, context: str) -> None:
    shim(f"""
    import warnings
    warnings.simplefilter("ignore")  # torch.cuda.amp is deprecated
    h = torch.ones(4, 4).cuda()
    @{context}
    def power(n):
        return h @ (power(n - 1) if n else h)
    assert power(2).dtype == torch.float16
    assert not torch.is_autocast_enabled("cpu")
    """)


def test_custom_function_casts_when_told_so(shim: Snippet) -> None:
    shim("""
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx, x):
            return x * 2
        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, g):
            return g * 2
    x = torch.ones(2).half().cuda().requires_grad_()
    with torch.autocast("cuda"):
        y = Double.apply(x)
    y.sum().backward()
    assert y.dtype == torch.float32 and x.grad.is_cuda
    """)
