"""Nested tensors on the GPU: the strided layout is served, the jagged one refused."""

import pytest

from tests.kit.programs.snippets import Snippet


@pytest.mark.parametrize(
    "made",
    [
        "torch.nested.nested_tensor([a.cuda(), b.cuda()])",
        "torch.nested.nested_tensor([a, b], device='cuda')",
        "torch.nested.as_nested_tensor([a.cuda(), b.cuda()])",
        "torch.nested.nested_tensor([a, b]).cuda()",
    ],
)
def test_strided_nested_tensor_computes_when_it_is_on_the_gpu(shim: Snippet, made: str) -> None:
    shim(f"""
    import warnings
    warnings.simplefilter("ignore")
    a, b = torch.arange(8.0).reshape(2, 4), torch.ones(3, 4)
    layer = torch.nn.Linear(4, 3).cuda()
    nested = {made}
    assert nested.is_cuda and nested.is_nested
    padded = (nested * 2).to_padded_tensor(0.0)
    assert padded.is_cuda and padded[0, :2].cpu().equal(a * 2)
    found = layer(nested).unbind()[1]
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), layer.cpu()(b))
    """)


@pytest.mark.parametrize(
    "call",
    [
        "torch.nested.nested_tensor([a, b], device='cuda', layout=torch.jagged)",
        "torch.nested.nested_tensor([a.cuda(), b.cuda()], layout=torch.jagged)",
        "torch.nested.as_nested_tensor([a.cuda(), b.cuda()], layout=torch.jagged)",
        "torch.nested.nested_tensor([a, b], layout=torch.jagged).cuda()",
        "torch.nested.nested_tensor_from_jagged(a.cuda(), torch.tensor([0, 1, 2]).cuda())",
    ],
)
def test_jagged_nested_tensor_is_refused_with_a_remedy(shim: Snippet, call: str) -> None:
    shim(f"""
    import warnings
    warnings.simplefilter("ignore")
    from torch_shim.errors import UnsupportedCall
    a, b = torch.ones(2, 4), torch.ones(3, 4)
    try:
        {call}
    except UnsupportedCall as error:
        assert "ested" in str(error) and error.remedy
    else:
        raise AssertionError
    """)
