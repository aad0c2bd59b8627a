"""Attention layers compute as in plain PyTorch, with handles and in traces."""

import textwrap

import pytest

from tests.kit.programs.snippets import Snippet

# Each gives a model and its arguments; the padding stands behind the sequences, and in front.
LAYERS = {
    "encoder": "encoder(), dict(src=x, src_key_padding_mask=behind)",
    "encoder_in_front": "encoder(), dict(src=x, src_key_padding_mask=behind.flip(1))",
    "encoder_of_gelu": (
        "encoder(activation='gelu', layer_norm_eps=0.1), dict(src=x, src_key_padding_mask=behind)"
    ),
    "encoder_with_all_left_out": "encoder(), dict(src=x, src_key_padding_mask=behind | empty)",
    "encoder_unchecked": "unchecked(encoder()), dict(src=x, src_key_padding_mask=behind)",
    "encoder_in_training": (
        "encoder(dropout=0.0).train(), dict(src=x, src_key_padding_mask=behind)"
    ),
    "encoder_of_unlike_layers": "unlike(encoder()), dict(src=x, src_key_padding_mask=behind)",
    "layer": "encoder().layers[0], dict(src=x, src_key_padding_mask=behind | empty)",
    "heads": (
        "torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(),"
        "dict(query=x, key=x, value=x, key_padding_mask=behind)"
    ),
}
MODELS = """
import copy

def encoder(**named):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **named)
    return torch.nn.TransformerEncoder(layer, 2).eval()

def unchecked(model):
    model.mask_check = False
    return model

def unlike(model):
    model.layers[1].self_attn.num_heads = 4
    return model

torch.manual_seed(0)
x = torch.randn(3, 5, 8)
behind = torch.arange(5) >= torch.tensor([[5], [2], [3]])
empty = torch.tensor([[False], [True], [False]])

def leaves(result):
    return [v.cpu() for v in (result if isinstance(result, tuple) else (result,))]
"""


def _program(layer: str, run: str) -> str:
    body = f"""
import warnings
warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
warnings.filterwarnings("ignore", "Converting mask without torch.bool dtype")
model, given = {LAYERS[layer]}
with torch.no_grad():
    expected = leaves(copy.deepcopy(model)(**given))
    model.cuda()
    handles = {{name: value.cuda() for name, value in given.items()}}
    if "query" in handles:
        handles["key"] = handles["value"] = handles["query"]
    {run}
assert result[0].is_cuda if isinstance(result, tuple) else result.is_cuda
found = leaves(result)
for one, other in zip(expected, found, strict=True):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
"""
    return MODELS + textwrap.dedent(body)


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_gives_plain_numbers_when_it_runs_on_handles(shim: Snippet, layer: str) -> None:
    shim(_program(layer, "result = model(**handles)"))


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_gives_plain_numbers_when_it_is_traced(dynamo_shim: Snippet, layer: str) -> None:
    traced = """
    from torch_shim.capture.dynamo import configure
    from torch_shim.tensors.handles import NoTorchFunction, become_cuda
    configure()
    def backend(module, _):
        def run(*args):
            with NoTorchFunction():
                return [become_cuda(value) for value in module.forward(*args)]
        return run
    result = torch.compile(model, backend=backend)(**handles)
"""
    shim = _program(layer, textwrap.indent(textwrap.dedent(traced), "    ").strip())
    dynamo_shim(shim)
