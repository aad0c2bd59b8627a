"""Which steps of a graph may draw random numbers: programs with one carry the generator's state."""

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from torch_shim.tensors.dispatch import names

_RANDOM = names(
    """
    dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_
    feature_alpha_dropout feature_dropout feature_alpha_dropout_ feature_dropout_
    native_dropout rrelu rrelu_ rrelu_with_noise rrelu_with_noise_ rand randn randint
    randperm rand_like randn_like randint_like
    normal normal_ bernoulli bernoulli_ multinomial poisson uniform_ exponential_ random_
    cauchy_ geometric_ log_normal_ scaled_dot_product_attention multi_head_attention_forward
    lstm gru rnn_tanh rnn_relu gumbel_softmax fractional_max_pool2d fractional_max_pool3d
    binomial uniform kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_
    trunc_normal_ embedding_bag stochastic_depth _fused_dropout _sample_dirichlet
    _standard_gamma
    """
)


def draws(name: str, node: fx.Node) -> bool:
    """Whether the step may draw random numbers; a dropout in evaluation mode does not."""
    place = name.rpartition(":")[2]
    short = place.partition(".")[0] if "::" in name else place.rpartition(".")[2]
    if short not in _RANDOM:
        return _is_tagged(node.target)
    if short.startswith("scaled_dot_product"):
        return bool(argument(node, 4, "dropout_p", 0.0) != 0.0)
    if "dropout" in short and "native" not in short:
        return argument(node, 2, "training", default=True) is not False
    if short == "rrelu":
        return argument(node, 3, "training", default=False) is not False
    if short.startswith("rrelu_with_noise"):
        return argument(node, 4, "training", default=False) is not False
    if short == "multi_head_attention_forward":
        return (
            bool(node.kwargs.get("training", True)) and argument(node, 9, "dropout_p", 0.0) != 0.0
        )
    if short in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return _recurrent_draws(node)
    return short != "embedding_bag"


def _is_tagged(target: Any) -> bool:
    """Whether torch says of a registered operator that it draws."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _recurrent_draws(node: fx.Node) -> bool:
    """Between its layers, while it trains: the arguments `dropout, train` follow whole numbers."""
    at = next((number for number, each in enumerate(node.args) if type(each) is float), None)
    if at is None or at + 1 == len(node.args):
        return True  # given in another way
    return bool(node.args[at] != 0.0) and node.args[at + 1] is not False


def argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    """Return the value that a call passes for one parameter, by position or name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)
