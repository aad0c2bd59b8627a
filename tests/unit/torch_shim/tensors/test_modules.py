"""Modules and parameters on the GPU."""

import pytest

from tests.kit.programs.snippets import Snippet


def test_parameters_keep_their_identity_when_a_module_moves(shim: Snippet) -> None:
    shim("""
    m = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    weight = m[0].weight
    assert m.cuda() is m and m[0].weight is weight and weight.is_cuda
    assert isinstance(weight, torch.nn.Parameter) and type(weight).__name__ == "Parameter"
    assert m[1].running_mean.is_cuda
    m(torch.ones(3, 2).cuda()).sum().backward()
    assert weight.grad.is_cuda
    m.cpu()
    assert type(weight) is torch.nn.Parameter and type(weight.grad) is torch.Tensor
    assert m[1].running_mean.is_cpu and m[0].weight is weight
    m.to("cuda", torch.float16)
    assert weight.is_cuda and weight.dtype == torch.float16
    assert m.double()[0].weight is weight and weight.is_cuda and weight.dtype == torch.float64
    """)


def test_tied_weights_stay_tied_when_a_module_moves(shim: Snippet) -> None:
    shim("""
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    second.weight = first.weight
    m = torch.nn.ModuleList([first, second]).cuda()
    assert m[0].weight is m[1].weight and len(list(m.parameters())) == 3
    """)


def test_module_loads_state_when_either_side_is_on_the_gpu(shim: Snippet) -> None:
    shim("""
    m = torch.nn.Linear(2, 2)
    state = {name: torch.full_like(value, 3.0).cuda() for name, value in m.state_dict().items()}
    m.load_state_dict(state)
    assert m.weight.is_cpu and m.weight[0, 0] == 3
    m.load_state_dict(state, assign=True)
    assert m.weight.is_cuda and isinstance(m.weight, torch.nn.Parameter)
    m.load_state_dict({name: torch.zeros_like(value).cpu() for name, value in state.items()})
    assert m.weight.is_cuda and m.weight[0, 0] == 0
    """)


def test_module_is_made_on_the_gpu_when_it_comes_from_meta(shim: Snippet) -> None:
    shim("""
    with torch.device("meta"):
        m = torch.nn.Linear(2, 2)
    m = m.to_empty(device="cuda")
    assert m.weight.is_cuda and m(torch.ones(1, 2).cuda()).is_cuda
    assert torch.nn.Embedding(3, 4, device="cuda").weight.is_cuda
    """)


@pytest.mark.parametrize(
    "flag", ["set_overwrite_module_params_on_conversion", "set_swap_module_params_on_conversion"]
)
def test_module_moves_when_a_future_flag_is_set(shim: Snippet, flag: str) -> None:
    shim(f"""
    torch.__future__.{flag}(True)
    m = torch.nn.Linear(2, 2).cuda()
    assert m.weight.is_cuda and isinstance(m.weight, torch.nn.Parameter)
    m.load_state_dict({{name: value.cpu() for name, value in m.state_dict().items()}})
    assert m.weight.is_cuda and m(torch.ones(1, 2).cuda()).is_cuda
    assert m.cpu().weight.is_cpu
    """)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_module_runs_when_sequences_are_packed(shim: Snippet, kind: str) -> None:
    shim(f"""
    from torch.nn.utils import rnn
    m = torch.nn.{kind}(2, 3, num_layers=2, bidirectional=True, batch_first=True)
    x = torch.randn(4, 5, 2)
    expected = m(x)[0]
    m.cuda().flatten_parameters()
    found, state = m(x.cuda())
    assert found.is_cuda and torch.equal(found.cpu(), expected)
    packed = rnn.pack_padded_sequence(x.cuda(), torch.tensor([5, 4, 3, 1]), batch_first=True)
    assert packed.data.is_cuda and packed.batch_sizes.is_cpu
    padded, lengths = rnn.pad_packed_sequence(m(packed)[0], batch_first=True)
    assert padded.is_cuda and lengths.is_cpu and lengths.tolist() == [5, 4, 3, 1]
    packed = rnn.pack_padded_sequence(
        x.cuda(), [1, 2, 5, 3], batch_first=True, enforce_sorted=False
    )
    assert packed.sorted_indices.is_cuda and packed.cpu().data.is_cpu
    assert rnn.pad_packed_sequence(m(packed)[0])[0].is_cuda
    """)


def test_lazy_module_materializes_on_the_gpu_when_moved_before(shim: Snippet) -> None:
    shim("""
    for m in (torch.nn.LazyLinear(3).cuda(), torch.nn.LazyLinear(3, device="cuda")):
        assert m(torch.ones(2, 4).cuda()).is_cuda and m.weight.is_cuda
        assert isinstance(m.weight, torch.nn.Parameter) and m.weight.shape == (3, 4)
    m = torch.nn.LazyBatchNorm1d().cuda()
    assert m(torch.ones(2, 4).cuda()).is_cuda and m.running_mean.is_cuda
    """)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_module_runs_when_moved(shim: Snippet, name: str) -> None:
    shim(f"""
    from torch.nn.utils.parametrizations import {name} as parametrize
    x = torch.ones(2, 3).cuda()
    for m in (parametrize(torch.nn.Linear(3, 3)).cuda(), parametrize(torch.nn.Linear(3, 3).cuda())):
        assert m(x).is_cuda and m.weight.is_cuda
    """)


def test_attention_modules_run_when_on_the_gpu(shim: Snippet) -> None:
    shim("""
    import warnings
    warnings.simplefilter("ignore")  # nested tensors are a prototype
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4)
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    m = torch.nn.TransformerEncoder(layer, 2).eval()
    mask = torch.tensor([[False, False, True], [False] * 3])
    with torch.no_grad():
        expected = m(x, src_key_padding_mask=mask)
        found = m.cuda()(x.cuda(), src_key_padding_mask=mask.cuda())
    assert found.is_cuda  # what is masked is not compared: it depends on the kernel
    torch.testing.assert_close(found.cpu()[~mask], expected[~mask])
    m = torch.nn.MultiheadAttention(4, 2).cuda()
    assert all(part.is_cuda for part in m(x.cuda(), x.cuda(), x.cuda()))
    """)


def test_data_parallel_runs_when_there_is_one_gpu(shim: Snippet) -> None:
    shim("""
    m = torch.nn.DataParallel(torch.nn.Linear(3, 3).cuda())
    assert m(torch.ones(2, 3)).is_cuda and m(torch.ones(2, 3).cuda()).is_cuda
    """)


def test_scripted_module_answers_on_the_gpu_when_moved(shim: Snippet) -> None:
    shim("""
    import io, warnings
    warnings.simplefilter("ignore")  # TorchScript is deprecated
    class Branching(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)
            self.register_buffer("bias", torch.zeros(3))
        def forward(self, x):
            if x.sum() > 0:
                return self.layer(x), {"a": x + self.bias}
            return x, {"a": x}
    m = torch.jit.script(Branching()).cuda()
    x = torch.ones(2, 3).cuda()
    y, more = m(x)
    assert y.is_cuda and more["a"].is_cuda and m.bias.is_cuda
    assert all(p.is_cuda for p in m.parameters())
    assert torch.jit.trace(torch.nn.Linear(3, 3).cuda(), x)(x).is_cuda
    file = io.BytesIO()
    torch.jit.save(m, file)
    file.seek(0)
    loaded = torch.jit.load(file, map_location="cuda")
    assert loaded(x)[0].is_cuda and next(loaded.parameters()).is_cuda
    file.seek(0)
    assert torch.jit.freeze(torch.jit.load(file).eval())(x)[0].is_cuda
    m.cpu()
    assert m(torch.ones(2, 3))[0].is_cpu and next(m.parameters()).is_cpu
    """)


def test_scripted_function_answers_where_its_arguments_are_when_called(shim: Snippet) -> None:
    shim("""
    import warnings
    warnings.simplefilter("ignore")  # TorchScript is deprecated
    @torch.jit.script
    def double(x):
        return x * 2 + torch.zeros_like(x)
    assert double(torch.ones(3).cuda()).is_cuda and double(torch.ones(3)).is_cpu
    """)
