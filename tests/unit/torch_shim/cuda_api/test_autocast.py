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


def test_autocast_leaves_a_call_as_it_is_when_that_says_where_its_result_goes(
    shim: Snippet,
) -> None:
    shim("""
    x = torch.ones(2, 2).bfloat16().cuda()
    written = torch.zeros_like(x)
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.exp(x, out=written) is written and written.min() > 2.7
        assert torch.pow(x * 3, 2, out=written).tolist() == [[9.0, 9.0]] * 2
        assert torch.linalg.vector_norm(x, dtype=torch.bfloat16).dtype == torch.bfloat16
    """)


def test_autocast_knows_an_operator_when_it_is_called_by_another_name(shim: Snippet) -> None:
    shim("""
    F = torch.nn.functional
    x = torch.ones(2, 2).bfloat16().cuda()
    with torch.autocast("cuda", torch.bfloat16):
        for result in (
            torch.special.softmax(x, -1), torch.special.log1p(x), torch.arccos(x), x.arcsin(),
            torch.linalg.norm(x), torch.linalg.vector_norm(x), torch.linalg.matrix_norm(x),
            F.pairwise_distance(x, x), F.gumbel_softmax(x), F.gaussian_nll_loss(x, x, x),
        ):
            assert result.dtype == torch.float32
        assert torch.special.exp2(x).dtype == torch.bfloat16
    """)


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
