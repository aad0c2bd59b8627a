"""Writes seeds.jsonl: valid arguments of operators, from torch's own samples of each operator.

`python -m hunt.fuzz.recording`. What a sample calls is recorded at both levels at which programs
name operators: functions of torch, and the registered operators that those are made of.
"""

import functools
import importlib
import itertools
import json
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hunt.fuzz.arguments import NotStorable, stored
from torch_shim.capture.encode import function_name

importlib.import_module("torch_shim.kernels.padded_encoder")  # registers it
importlib.import_module("torchvision")  # registers its operators
SEEDS = Path(__file__).with_name("seeds.jsonl")
_SAMPLES = 6  # of each operator
_SEEDS = 3  # of each name, where torch's samples give as many
_MOST_CHARACTERS = 1200


class Recorded:
    """Arguments by name, a few of each."""

    def __init__(self) -> None:
        self.seeds: dict[str, set[str]] = {}

    def function(self, found: Any, arguments: Iterable[Any], named: dict[str, Any]) -> None:
        """A call of a function of torch or of a method."""
        name = function_name(found)
        short = getattr(found, "__name__", "")
        if name is not None:
            self.add(f"t:{name}", arguments, named)
        elif getattr(torch.Tensor, short, None) is found:
            self.add(f"m:{short}", arguments, named)

    def add(self, name: str, arguments: Iterable[Any], named: dict[str, Any]) -> None:
        """One call, unless there are enough or it has an argument of another kind."""
        known = self.seeds.setdefault(name, set())
        if len(known) >= _SEEDS:
            return
        try:
            text = json.dumps([stored(list(arguments)), {k: stored(v) for k, v in named.items()}])
        except (NotStorable, RuntimeError):
            return
        if len(text) <= _MOST_CHARACTERS:
            known.add(text)


class _Functions(TorchFunctionMode):
    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self._recorded = recorded

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._recorded.function(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Registered(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch gives it no types
    def __init__(self, recorded: Recorded) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # as above
        self._recorded = recorded

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        full = str(func.name())
        name = full if "." in full else f"{full}.default"
        self._recorded.add(f"a:{name}", args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _samples() -> Iterator[tuple[Any, Any]]:
    # torch's own samples want a package that only its own tests need.
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined] # that is the point
    sys.modules.setdefault("expecttest", stand_in)
    from torch.testing._internal.common_methods_invocations import (  # noqa: PLC0415 - behind that
        op_db,
    )

    for operator in op_db:
        known = sorted(operator.dtypes, key=str)
        dtype = torch.float32 if torch.float32 in known or not known else known[0]
        try:
            given = operator.sample_inputs("cpu", dtype)  # type: ignore[no-untyped-call] # as above
            yield from ((operator, sample) for sample in itertools.islice(given, _SAMPLES))
        except RuntimeError:
            continue


def record() -> dict[str, set[str]]:
    """Run every sample and keep what it called."""
    recorded = Recorded()
    warnings.simplefilter("ignore")
    with torch.no_grad():
        for operator, sample in _samples():
            variants = [operator.op, operator.method_variant, operator.inplace_variant]
            for variant in filter(None, variants):
                try:
                    with _Functions(recorded), _Registered(recorded):
                        variant(sample.input, *sample.args, **sample.kwargs)
                except (RuntimeError, TypeError, ValueError, IndexError, AssertionError):
                    continue
        for work in _more_samples():
            with _Functions(recorded), _Registered(recorded):
                work()
    return recorded.seeds


def _more_samples() -> Iterator[Callable[[], Any]]:
    """Calls of what torch's samples leave out: recurrent layers, torchvision's operators."""
    sequence = torch.randn(3, 2, 4)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        yield functools.partial(kind(4, 5, bidirectional=True), sequence)
        packed = nn.utils.rnn.pack_padded_sequence(sequence, torch.tensor([3, 2]))
        yield functools.partial(kind(4, 5), packed)
        yield functools.partial(nn.utils.rnn.pad_packed_sequence, packed)
    yield functools.partial(nn.LSTM(4, 5, proj_size=3, num_layers=2), sequence)
    yield functools.partial(nn.RNN(4, 5, nonlinearity="relu"), sequence)
    masks = ((None, None), ((2, 2), 0), ((3, 2), 1), ((3, 2, 2, 2), 2))
    yield from map(_encoder_layer, masks)
    yield from map(_native_heads, masks)
    yield from map(_padded_encoder, (True, False))
    for cell in (nn.LSTMCell(4, 5), nn.GRUCell(4, 5), nn.RNNCell(4, 5)):
        yield functools.partial(cell, torch.randn(2, 4))
    yield functools.partial(nn.MultiheadAttention(4, 2), sequence, sequence, sequence)
    words, starts = torch.tensor([1, 2, 0, 3, 1]), torch.tensor([0, 2])
    for mode in ("sum", "mean", "max"):
        yield functools.partial(nn.EmbeddingBag(4, 3, mode=mode), words, starts)
    table, scale = torch.randn(4, 3), torch.rand(5)
    for number in range(3):
        plain = (table, words, starts, False, number, False, None)
        yield functools.partial(torch.embedding_bag, *plain)
    yield functools.partial(torch.embedding_bag, table, words, starts, per_sample_weights=scale)
    numbers, channels = torch.randn(2, 4, 3, 3), torch.rand(4)
    four = (channels, channels, channels, channels)
    yield functools.partial(torch.batch_norm, numbers, *four, False, 0.1, 1e-5, False)
    yield functools.partial(torch.instance_norm, numbers, *four, True, 0.1, 1e-5, False)
    yield functools.partial(torch.group_norm, numbers, 2, channels, channels)
    grid = torch.rand(2, 3, 3, 2)
    yield functools.partial(torch.grid_sampler, numbers, grid, 0, 0, False)
    image, boxes = torch.randn(1, 4, 8, 8), torch.tensor([[0.0, 1, 1, 4, 4], [0, 2, 2, 6, 6]])
    vision = torch.ops.torchvision
    yield functools.partial(vision.nms, boxes[:, 1:], torch.tensor([0.5, 0.7]), 0.5)
    yield functools.partial(vision.roi_align, image, boxes, 1.0, 2, 2, 2, False)
    yield functools.partial(vision.roi_pool, image, boxes, 1.0, 2, 2)
    yield functools.partial(vision.ps_roi_align, image, boxes, 1.0, 2, 2, 2)
    yield functools.partial(vision.ps_roi_pool, image, boxes, 1.0, 2, 2)
    offset, mask = torch.randn(1, 18, 6, 6), torch.rand(1, 9, 6, 6)
    weight, bias = torch.randn(2, 4, 3, 3), torch.randn(2)
    sizes = (1, 1, 0, 0, 1, 1, 1, 1, True)
    yield functools.partial(vision.deform_conv2d, image, weight, offset, mask, bias, *sizes)


_ATTENTION = ((12, 4), (12,), (4, 4), (4,))
_FEED_FORWARD = ((4,), (4,), (4,), (4,), (8, 4), (8,), (4, 8), (4,))


def _encoder_layer(masked: tuple[Any, Any]) -> "functools.partial[Any]":
    """The one call that `nn.TransformerEncoderLayer` makes where nobody watches it."""
    found: list[Any] = [torch.randn(3, 2, 4), 4, 2, *map(torch.randn, _ATTENTION)]
    found += [False, False, 1e-5, *map(torch.randn, _FEED_FORWARD)]
    operator: Any = torch._transformer_encoder_layer_fwd  # noqa: SLF001 - as torch's module does
    return functools.partial(operator, *found, *_mask(masked))


def _native_heads(masked: tuple[Any, Any]) -> "functools.partial[Any]":
    """The same of `nn.MultiheadAttention`."""
    sequence = torch.randn(3, 2, 4)
    found = [sequence, sequence, sequence, 4, 2, *map(torch.randn, _ATTENTION)]
    mask, kind = _mask(masked)
    operator: Any = torch._native_multi_head_attention  # noqa: SLF001 - as torch's module does
    return functools.partial(operator, *found, mask, True, True, kind)


def _padded_encoder(mask_check: bool) -> "functools.partial[Any]":  # noqa: FBT001 - of a table
    padding = torch.tensor([[False, False], [False, True], [True, True]])
    weights = list(map(torch.randn, (*_ATTENTION, *_FEED_FORWARD)))
    operator = torch.ops.gpufaas.padded_encoder
    return functools.partial(
        operator, torch.randn(3, 2, 4), padding, mask_check, 2, False, 1e-5, weights
    )


def _mask(masked: tuple[Any, Any]) -> tuple[Any, Any]:
    shape, kind = masked
    return None if shape is None else torch.zeros(shape, dtype=torch.bool), kind


if __name__ == "__main__":
    seeds = sorted(record().items())  # whole before the file is emptied
    with SEEDS.open("w", encoding="utf-8") as file:
        for name, texts in seeds:
            for text in sorted(texts):
                file.write(json.dumps([name, *json.loads(text)], separators=(",", ":")) + "\n")
