"""Which steps draw random numbers, and so have their call wait for its turn."""

from typing import Any

import pytest
import torch
from torch import fx

from torch_shim.capture.encode import draws


def step(operator: Any, *args: Any, **named: Any) -> fx.Node:
    return fx.Graph().call_function(operator, args, named)


@pytest.mark.parametrize(
    ("dropout", "train", "drawn"),
    [(0.5, True, True), (0.5, False, False), (0.0, True, False), (0.0, False, False)],
)
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_layer_draws_when_it_trains_with_a_dropout(
    dropout: float, *, train: bool, drawn: bool, packed: bool
) -> None:
    input_ = ["data", "batch_sizes", ["hx"], ["w"]] if packed else ["input", ["hx"], ["w"]]
    options = [True, 2, dropout, train, False]
    assert draws("t:torch.lstm", step(torch.lstm, *input_, *options)) is drawn


def test_recurrent_layer_draws_when_its_options_are_given_in_another_way() -> None:
    assert draws("t:torch.gru", step(torch.gru, "input", "hx", ["w"], True, 2, dropout=0.0))


@pytest.mark.parametrize(
    ("name", "arguments", "drawn"),
    [
        ("a:aten::rand.default", ([2],), True),
        ("a:aten::normal_.default", ("x",), True),
        ("a:aten::bernoulli.p", ("x", 0.5), True),
        ("a:aten::native_dropout.default", ("x", 0.5, True), True),
        ("a:aten::dropout.default", ("x", 0.5, True), True),
        ("a:aten::dropout.default", ("x", 0.5, False), False),
        ("a:aten::scaled_dot_product_attention.default", ("q", "k", "v"), False),
        ("a:aten::relu.default", ("x",), False),
    ],
)
def test_registered_operator_draws_when_the_function_of_its_name_does(
    name: str, arguments: tuple[Any, ...], *, drawn: bool
) -> None:
    assert draws(name, step(torch.relu, *arguments)) is drawn


def test_every_registered_operator_draws_that_torch_says_draws() -> None:
    """With the arguments that have it draw, where it may also not."""
    drawing = {"p": 0.5, "dropout_p": 0.5, "dropout": 0.5, "train": True, "training": True}
    silent = []
    for name in torch._C._dispatch_get_all_op_names():  # noqa: SLF001 - torch has no public list
        space, _, rest = name.partition("::")
        if space != "aten":
            continue
        short, _, overload = rest.partition(".")
        found = getattr(getattr(torch.ops.aten, short), overload or "default", None)
        if found is None or torch.Tag.nondeterministic_seeded not in found.tags:
            continue
        named = {each.name for each in found._schema.arguments} & drawing.keys()  # noqa: SLF001 - as above
        node = step(found, **{each: drawing[each] for each in named})
        if not draws(f"a:aten::{short}.{overload or 'default'}", node):
            silent.append(name)
    assert silent == []


def test_noisy_rrelu_draws_when_it_trains() -> None:
    operator: Any = getattr(torch._C._nn, "rrelu_with_noise")  # noqa: B009, SLF001 - torch gives it no type
    name = "t:torch._C._nn.rrelu_with_noise"
    assert draws(name, step(operator, "x", "noise", 0.1, 0.3, True))
    assert not draws(name, step(operator, "x", "noise", 0.1, 0.3))
