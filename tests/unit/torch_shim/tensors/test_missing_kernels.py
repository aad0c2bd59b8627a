"""Handles run what CUDA has kernels for, where the CPU that they really lie on has none."""

import pytest

from tests.kit.programs.snippets import Snippet


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("torch.tensor([0, 3, 3], device='cuda').histc(4, 0, 3)", "[1, 0, 0, 2]"),
        ("torch.histc(torch.tensor([0, 3, 3]).cuda(), bins=2, min=0, max=3)", "[1, 2]"),
        ("torch.tensor([True, False]).cuda().abs()", "[True, False]"),
        ("torch.fft.fft(torch.ones(2).half().cuda()).real.float()", "[2.0, 0.0]"),
        ("torch.mm(h, h, out_dtype=torch.float32)[0]", "[2.0, 2.0]"),
        ("torch.ops.aten.mm.dtype(h, h, torch.float32)[0]", "[2.0, 2.0]"),
        ("torch.ones(2, dtype=torch.complex32).cuda().mul_(0).exp_().real.float()", "[1.0, 1.0]"),
        ("torch.nn.functional.avg_pool3d(h[None, None], 1)[0, 0, 0]", "[1.0, 1.0]"),
    ],
)
def test_operator_runs_when_only_cuda_has_a_kernel(shim: Snippet, call: str, expected: str) -> None:
    shim(f"""
    import warnings
    warnings.filterwarnings("ignore", message="ComplexHalf")
    h = torch.ones(2, 2).half().cuda()
    found = {call}
    assert found.is_cuda and found.tolist() == {expected}, found
    """)


@pytest.mark.parametrize("name", ["EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "FLASH_ATTENTION"])
def test_attention_runs_when_a_program_asks_for_a_kernel_of_cudas(shim: Snippet, name: str) -> None:
    shim(f"""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    attention = torch.nn.functional.scaled_dot_product_attention
    q = torch.randn(1, 2, 4, 8)
    with sdpa_kernel(SDPBackend.{name}):
        found = attention(q.cuda(), q.cuda(), q.cuda(), is_causal=True)
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), attention(q, q, q, is_causal=True))
    """)


def test_attention_gives_the_sums_too_when_called_by_its_kernels_name(shim: Snippet) -> None:
    shim("""
    q = torch.randn(1, 2, 4, 8)
    scores = (q @ q.transpose(-2, -1)) * 8**-0.5
    found, sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q.cuda(), q.cuda(), q.cuda(), None, True)
    torch.testing.assert_close(found.cpu(), scores.softmax(-1) @ q)
    torch.testing.assert_close(sums.cpu(), scores.logsumexp(-1))
    assert sums.is_cuda
    """)


def test_in_place_operator_writes_to_its_tensor_when_it_is_computed_wide(shim: Snippet) -> None:
    shim("""
    import warnings
    warnings.filterwarnings("ignore", message="ComplexHalf")
    from torch_shim.tensors import write_epochs
    x = torch.zeros(2, dtype=torch.complex32).cuda()
    mark = write_epochs.marked(x)
    before = mark.epoch
    assert x.exp_() is x and x.real.tolist() == [1.0, 1.0] and mark.epoch != before
    """)


def test_error_is_torchs_when_no_device_has_a_kernel(shim: Snippet) -> None:
    shim("""
    try:
        torch.ones(2).cuda() @ torch.ones(3).cuda()
    except RuntimeError as error:
        assert "inconsistent tensor size" in str(error), error
    else:
        raise AssertionError
    """)
