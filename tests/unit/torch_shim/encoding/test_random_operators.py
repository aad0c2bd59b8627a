"""Which steps draw random numbers, and so have their call wait for its turn."""

from typing import Any

import pytest
import torch
from torch import fx

from torch_shim.encoding.random_operators import draws


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
