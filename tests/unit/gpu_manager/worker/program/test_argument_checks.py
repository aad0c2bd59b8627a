"""Arguments with which a kernel would leave its memory are refused before it runs."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpu_manager.call_errors import CallRefused
from gpu_manager.worker.program.allowed_operators import OperatorTable
from gpu_manager.worker.program.build import BuiltProgram
from tests.kit.outcomes import instead_of
from tests.kit.worlds.caller import CallFailed, LocalWorker, program, step
from torch_shim.wire.programs import Constant, DeviceName, Named, Ref

importlib.import_module("torchvision")  # registers its operators
TABLE = OperatorTable(torch.device("cpu"))
IMAGE = torch.ones(1, 4, 8, 8)
WORDS = torch.tensor([0, 1, 2])
FOUR = torch.ones(4)


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def operator(name: str) -> Callable[..., Any]:
    found = TABLE.find(name)
    assert found is not None, name
    return found


def box(image: float) -> torch.Tensor:
    return torch.tensor([[image, 0.0, 0.0, 4.0, 4.0]])


REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "a box of another image": ("a:torchvision::roi_align", (IMAGE, box(5), 1.0, 2, 2, 2, False)),
    "a box of no image": ("a:torchvision::roi_pool.default", (IMAGE, box(torch.nan), 1.0, 2, 2)),
    "boxes without corners": ("a:torchvision::ps_roi_pool", (IMAGE, box(0)[:, :0], 1.0, 2, 2)),
    "boxes of no size": ("a:torchvision::ps_roi_align", (IMAGE, box(0), 1.0, 2, 0, 2)),
    "an unknown interpolation": ("a:aten::grid_sampler_2d", (IMAGE, IMAGE[..., :2], 7, 0, False)),
    "an unknown padding": ("t:torch.grid_sampler", (IMAGE, IMAGE[..., :2], 0, 9, False)),
    "an offset below the indices": (
        "t:torch.embedding_bag",
        (torch.ones(4, 2), WORDS, torch.tensor([0, -(1 << 40), 1])),
    ),
    "an offset behind the indices": (
        "a:aten::_embedding_bag.default",
        (torch.ones(4, 2), WORDS, torch.tensor([0, 1 << 40])),
    ),
    "no offset": (
        "t:torch.embedding_bag",
        (torch.ones(4, 2), WORDS, torch.tensor([], dtype=torch.int64)),
    ),
    "offsets out of order": (
        "t:torch.nn.functional.embedding_bag",
        (WORDS, torch.ones(4, 2), torch.tensor([0, 2, 1])),
    ),
    "an index behind the table": (
        "t:torch.nn.functional.embedding_bag",
        (torch.tensor([4]), torch.ones(4, 2), torch.tensor([0])),
    ),
    "few statistics": (
        "a:aten::_native_batch_norm_legit",
        (IMAGE, FOUR, FOUR, torch.ones(()), FOUR, True, 0.1, 1e-5),
    ),
    "few weights for a norm": (
        "a:aten::native_batch_norm.default",
        (IMAGE, FOUR[:1], FOUR, FOUR, FOUR, False, 0.1, 1e-5),
    ),
    "sizes that are not the input's": (
        "t:torch.native_group_norm",
        (IMAGE, FOUR, FOUR, 9, 4, 64, 2, 1e-5),
    ),
    "a quotient too large": ("t:torch.div", (torch.tensor([-(1 << 63)]), torch.tensor([-1]))),
    "a number for a dtype": ("a:aten::to.dtype", (FOUR, -2)),
    "a number for dtypes": ("a:aten::promote_types", (2, 64)),
    "strides that overflow": ("m:as_strided_", (FOUR, [10, 22], [4, (1 << 63) - 1])),
    "elements behind the storage": ("t:torch.as_strided", (FOUR, [5], [1])),
    "an offset behind the storage": ("a:aten::as_strided.default", (FOUR, [1], [1], 1 << 62)),
    "elements behind the copy": (
        "t:torch.as_strided_scatter",
        (torch.ones(9)[:4], torch.ones(5), [5], [1], 0),
    ),
    "strides that take everything": ("t:torch.empty_strided", ([10, 22], [4, (1 << 63) - 1])),
    "a scale that is not the size's": (
        "a:aten::upsample_bilinear2d.default",
        (IMAGE, [17, 18], False, 1.7, 0.5),
    ),
    "an unknown reduction": ("a:aten::mse_loss", (FOUR, FOUR, 7)),
    "a reduction below the first": ("t:torch.kl_div", (FOUR, FOUR, -1)),
    "more values than keys": (
        "t:torch.nn.functional.scaled_dot_product_attention",
        (torch.ones(2, 3, 4), torch.ones(2, 3, 4), torch.ones(2, 17, 4)),
    ),
    "more keys than values": (
        "a:aten::scaled_dot_product_attention",
        (torch.ones(4, 3, 8), torch.ones(4, 7, 8), torch.ones(4, 6, 8)),
    ),
    "norms of other weights": ("t:torch._weight_norm", (torch.ones(3), torch.ones(0, 3), 0)),
    "targets of another shape": ("a:aten::binary_cross_entropy", (torch.ones(()), FOUR[:0])),
    "infinite matrices": ("t:torch.linalg.eigvals", (torch.full((6, 6), -torch.inf),)),
    "no stride": (
        "a:torchvision::deform_conv2d",
        (IMAGE, IMAGE, IMAGE, IMAGE, FOUR, -1, 0, 2, 3, 0, -1, -1, 2, False),
    ),
}
NAMED = {"a quotient too large": {"rounding_mode": "trunc"}}


def test_operator_refuses() -> None:
    errors = (ValueError, RuntimeError)
    wrong = {}
    for what, (name, arguments) in REFUSED.items():
        if taken := instead_of(errors, operator(name), *arguments, **NAMED.get(what, {})):
            wrong[what] = f"{name} {taken}"
    assert wrong == {}


def test_operator_refuses_a_number_for_a_memory_format() -> None:
    with pytest.raises(ValueError, match="no dtype, layout or memory format"):
        operator("a:aten::clone")(FOUR, memory_format=9)


def _lstm(**changes: Any) -> tuple[Any, ...]:
    """The arguments of a padded batch."""
    layer = nn.LSTM(4, 5, bidirectional=True)
    found = {
        "data": torch.ones(3, 2, 4),
        "states": [torch.zeros(2, 2, 5), torch.zeros(2, 2, 5)],
        "weights": [weight.detach() for weight in layer.all_weights[0] + layer.all_weights[1]],
        "biases": True,
        "layers": 1,
        "dropout": 0.0,
        "training": False,
        "both": True,
        "first": False,
    }
    return tuple({**found, **changes}.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"first": True},
        {"biases": False},
        {"layers": 2},
        {"layers": 0},
        {"both": False},
        {"states": [torch.zeros(2, 2, 5)]},
        {"states": [torch.zeros(2, 2, 5), torch.zeros(2, 1, 5)]},
        {"weights": []},
        {"weights": [torch.ones(20, 1)] * 8},
        {"data": torch.ones(3, 2, 5)},
        {"data": torch.ones(3, 2)},
    ],
    ids="_".join,
)
def test_recurrent_layer_refuses_what_does_not_fit(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"weights|state|sequences"):
        operator("t:torch.lstm")(*_lstm(**changes))


@pytest.mark.parametrize("sizes", [[2, 2], [2, 2, 2], [1, 2, 2], [5, 0], []])
def test_packed_sequences_refuse_batch_sizes_that_are_not_the_datas(sizes: list[int]) -> None:
    data, weights = torch.ones(5, 4), _lstm()[2][:4]
    states = [torch.zeros(1, 2, 5)] * 2
    arguments = (torch.tensor(sizes, dtype=torch.int64), states, weights, True, 1, 0.0)
    with pytest.raises(ValueError, match="batch sizes"):
        operator("t:torch.lstm")(data, *arguments, False, False)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("more", [{}, {"bias": False}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_layer_computes_when_everything_fits(
    kind: Any, more: dict[str, Any], *, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {nn.LSTM: "lstm", nn.GRU: "gru", nn.RNN: "rnn_tanh"}[kind]
    layer, data = kind(4, 5, **more), torch.randn(3, 2, 4)
    given = nn.utils.rnn.pack_padded_sequence(data, torch.tensor([3, 2])) if packed else data
    expected = layer(given)[0]
    called = []

    def ours(*arguments: Any) -> Any:
        called.append(name)
        return operator(f"t:torch.{name}")(*arguments)

    monkeypatch.setattr(torch._VF, name, ours)  # noqa: SLF001 - what torch.nn calls
    if kind is nn.RNN:
        monkeypatch.setitem(nn.modules.rnn._rnn_impls, "RNN_TANH", ours)  # noqa: SLF001 - as above
    found = layer(given)[0]
    assert called
    assert torch.equal(found.data, expected.data)


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_projected_states_compute_when_everything_fits() -> None:
    layer, data = nn.LSTM(4, 5, proj_size=3, num_layers=2), torch.randn(3, 2, 4)
    states = [torch.zeros(2, 2, 3), torch.zeros(2, 2, 5)]
    weights = [weight.detach() for group in layer.all_weights for weight in group]
    more = (data, states, weights, True, 2, 0.0, False, False, False)
    assert torch.equal(operator("t:torch.lstm")(*more)[0], layer(data)[0])


def _encoder(**changes: Any) -> tuple[Any, ...]:
    sizes = [(12, 4), (12,), (4, 4), (4,)]
    found: list[Any] = [torch.ones(3, 2, 4), 4, 2, *(torch.ones(size) for size in sizes)]
    found += [False, False, 1e-5, *[FOUR] * 4]
    found += [torch.ones(size) for size in ((8, 4), (8,), (4, 8), (4,))]
    found += [torch.zeros(3, 2, dtype=torch.bool), 1]
    for place, value in changes.items():
        found[int(place[1:])] = value
    return tuple(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"_1": 8},
        {"_2": 3},
        {"_2": 0},
        {"_3": torch.ones(11, 4)},
        {"_12": torch.ones(1)},
        {"_16": torch.ones(4, 7)},
        {"_18": torch.zeros(9, 9, dtype=torch.bool)},
        {"_19": 5},
        {"_19": None},
    ],
    ids="_".join,
)
def test_encoder_layer_refuses_what_does_not_fit(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"weights|mask|heads|input"):
        operator("t:torch._transformer_encoder_layer_fwd")(*_encoder(**changes))


def test_encoder_layer_computes_when_everything_fits() -> None:
    arguments = _encoder()
    found = operator("t:torch._transformer_encoder_layer_fwd")(*arguments)
    expected = torch._transformer_encoder_layer_fwd(*arguments)  # noqa: SLF001 - as torch's module does
    assert torch.equal(found, expected)


def _heads(**changes: Any) -> tuple[Any, ...]:
    sequence = torch.ones(3, 2, 4)
    weights = [torch.ones(size) for size in ((12, 4), (12,), (4, 4), (4,))]
    mask = torch.zeros(3, 2, dtype=torch.bool)
    found: list[Any] = [sequence, sequence, sequence, 4, 2, *weights, mask, True, True, 1]
    for place, value in changes.items():
        found[int(place[1:])] = value
    return tuple(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"_1": torch.ones(3, 5, 4)},
        {"_3": 8},
        {"_4": 3},
        {"_4": 0},
        {"_5": torch.ones(11, 4)},
        {"_8": torch.ones(3)},
        {"_9": torch.zeros(2, 3, dtype=torch.bool)},
        {"_12": 3},
    ],
    ids="_".join,
)
def test_native_heads_refuse_what_does_not_fit(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"weights|mask|heads|queries|keys"):
        operator("t:torch._native_multi_head_attention")(*_heads(**changes))


def test_native_heads_compute_when_everything_fits() -> None:
    found = operator("t:torch._native_multi_head_attention")(*_heads())
    expected = torch._native_multi_head_attention(*_heads())  # noqa: SLF001 - as torch's module does
    assert all(map(torch.equal, found, expected))


def _padded(**changes: Any) -> tuple[Any, ...]:
    padding = torch.tensor([[False, False], [False, True], [True, True]])
    weights = [value for value in _encoder()[3:18] if isinstance(value, torch.Tensor)]
    found: list[Any] = [torch.ones(3, 2, 4), padding, True, 2, False, 1e-5, weights * 2]
    for place, value in changes.items():
        found[int(place[1:])] = value
    return tuple(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"_0": torch.ones(3, 2, 5)},
        {"_1": torch.zeros(3, 3, dtype=torch.bool)},
        {"_3": 3},
        {"_6": []},
        {"_6": [FOUR] * 12},
        {"_6": [FOUR] * 11},
    ],
    ids="_".join,
)
def test_padded_encoder_refuses_what_does_not_fit(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"weights|mask|heads|input"):
        operator("a:gpufaas::padded_encoder.default")(*_padded(**changes))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("mask_check", [True, False])
def test_padded_encoder_leaves_zeros_where_padding_is_behind(*, mask_check: bool) -> None:
    found = operator("a:gpufaas::padded_encoder.default")(*_padded(_2=mask_check))
    assert not found[1, 1].any()
    assert not found[2].any()
    assert found[0].any()


def test_padded_encoder_keeps_padding_when_it_is_in_front() -> None:
    padding = torch.tensor([[False, False], [True, False], [False, False]])
    found = operator("a:gpufaas::padded_encoder.default")(*_padded(_1=padding))
    assert found[1, 0].any()


EMPTY: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "t:torch.empty": (([64, 64],), {}),
    "t:torch.empty_like": ((torch.ones(64, 64),), {}),
    "t:torch.empty_strided": (([64, 64], [1, 64]), {}),
    "t:torch.empty_permuted": (([64, 64], [1, 0]), {}),
    "m:new_empty": ((FOUR, [64, 64]), {}),
    "m:new_empty_strided": ((FOUR, [64, 64], [200, 2]), {}),
    "a:aten::empty.memory_format": (([64, 64],), {}),
    "a:aten::empty_like.default": ((torch.ones(64, 64),), {}),
    "a:aten::new_empty": ((FOUR, [64, 64]), {}),
}


@pytest.mark.parametrize("name", EMPTY)
def test_memory_is_zero_when_a_program_asks_for_an_empty_tensor(name: str) -> None:
    arguments, named = EMPTY[name]
    for _ in range(8):
        before = [torch.full((64, 201), 7.0) for _ in range(4)]  # what the next allocations get
        del before
        found = operator(name)(*arguments, **named)
        whole = torch.empty(0).set_(found.untyped_storage())
        assert not whole.any()


def test_attribute_is_refused_when_it_is_a_method() -> None:
    with pytest.raises(TypeError, match="values is a method"):
        operator("g:values")(FOUR)
    assert torch.equal(operator("g:values")(FOUR.sort()), FOUR)


@pytest.mark.parametrize("name", ["meta", "xla", "mps", "lazy:0"])
def test_program_is_refused_when_it_names_another_device(name: str) -> None:
    for device in (name, DeviceName(name)):
        with pytest.raises(CallRefused, match="device"):
            BuiltProgram("d", program(step("m:to", Ref(0), device), output=[Ref(1)]), TABLE)


def test_program_is_refused_when_it_names_a_sparse_layout() -> None:
    what = program(step("t:torch.zeros", [2], layout=Named("layout", "sparse_coo")), output=[])
    with pytest.raises(CallRefused, match="argument"):
        BuiltProgram("d", what, TABLE)


@pytest.mark.parametrize("shape", [(-1, -4), (0, -1), (0, 1 << 70)])
def test_program_is_refused_when_a_constant_has_no_such_shape(shape: tuple[int, ...]) -> None:
    constant = Constant("uint8", shape, b"1234" if 0 not in shape else b"")
    with pytest.raises(CallRefused, match="constant"):
        BuiltProgram("d", program(output=[Ref(1)], constants=(constant,)), TABLE)


def test_call_fails_and_the_worker_goes_on_when_a_check_refuses() -> None:
    worker = LocalWorker()
    what = program(step("a:aten::to.dtype", Ref(0), -2), output=[Ref(1)])
    with worker.connect() as caller:
        with pytest.raises(CallFailed, match="no dtype"):
            caller.call(what, FOUR)
        again = program(step("m:add", Ref(0), 1), output=[Ref(1)])
        assert torch.equal(caller.call(again, FOUR).outputs[0], FOUR + 1)
    worker.join()


def test_call_fails_and_the_worker_goes_on_when_an_output_has_no_memory() -> None:
    worker = LocalWorker()
    space = "t:torch._functorch.predispatch."
    inside = program(
        step(f"{space}_vmap_increment_nesting", 4, "error"),
        step(f"{space}_add_batch_dim", Ref(0), 0, Ref(1)),
        output=[Ref(2)],
    )
    with worker.connect() as caller:
        with pytest.raises(CallFailed, match="inside of vmap"):
            caller.call(inside, FOUR)
        again = program(step("m:add", Ref(0), 1), output=[Ref(1)])
        assert torch.equal(caller.call(again, FOUR).outputs[0], FOUR + 1)
    worker.join()
