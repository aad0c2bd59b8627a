"""Bounds on the numbers, texts and lists of Python that programs compute with beside tensors.

Python computes `3 ** 20_000_000` in one go, while no other thread of the worker gets on, and no
account has the memory of a list. So whatever computes with such values refuses, before it begins,
those that are too large and those of which it would make what is too large.
"""

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpu_manager.worker.program.layer_checks import require

Operator = Callable[..., Any]

_MOST_BITS = 1024  # of a whole number: no finite float has more
_LARGEST_SMALL, _LEAST_SMALL = 1 << 62, -1 << 62  # no closer look is needed
_MOST_ENTRIES = 1 << 22  # of the lists and texts that the steps of a call take or make
_ENTRIES_OF_ROW = 32  # a tensor of each takes that much memory

# They take as long for a long list as for a short one.
_HARMLESS = frozenset({"o:is_", "o:is_not", "o:not_", "o:truth", "o:index", "b:bool", "b:len"})
_OF_PARTS = frozenset({"o:getitem"})  # these read no more of a list than they give
_OVER_ROWS = frozenset({"b:max", "b:min", "b:sum", "M:dist", "M:fsum", "M:prod"})  # of a tensor
_OF_TENSORS: dict[str, Operator] = {"o:mul": torch.mul}  # Python has a tensor repeat a list, too
_OF_LISTS = frozenset({"t:torch.tensor", "t:torch.as_tensor", "t:torch.asarray", "m:new_tensor"})
_AT_PLACES = frozenset({"o:getitem", "o:setitem"})  # of a tensor, which may be named by a list
_OF_ONE_SIZE = frozenset({torch.Tensor, float, bool, complex, type(None)})
_PLACES = _OF_ONE_SIZE | {int, slice, type(...)}
_SEQUENCES = (list, tuple, str)


class _Allowance(threading.local):
    """The entries that steps of this thread's call may yet take or make."""

    entries = _MOST_ENTRIES


_allowance = _Allowance()


def begin_call() -> None:
    """What this thread's programs do from now on is another call's."""
    _allowance.entries = _MOST_ENTRIES


def bounded(name: str, operator: Operator) -> Operator:
    """The operator within the bounds, if it computes with values of Python.

    `of_tensors` gives it without them.
    """
    if not _takes_plain_values(name) or name in _HARMLESS:
        return operator
    operator = _at_small_places(operator) if name in _AT_PLACES else operator
    is_pythons = not _makes_tensors(name)
    refuse_growth = _GROWTH.get(name[2:].removeprefix("operator.")) if is_pythons else None
    over_rows, reads_all = name in _OVER_ROWS, name not in _OF_PARTS

    @functools.wraps(operator, updated=())
    def call(*arguments: Any, **named: Any) -> Any:
        if over_rows or named or (reads_all and not _are_small(arguments)):
            values = (*arguments, *named.values())
            has_list = is_pythons and isinstance(values[0], _SEQUENCES)
            _refuse_large(values, over_rows=over_rows or has_list)
        if refuse_growth is not None:
            refuse_growth(*arguments, **named)
        return operator(*arguments, **named)

    if name.startswith(("o:", "a:")):  # others may take a tensor for a whole number
        call.of_tensors = _OF_TENSORS.get(name, operator)  # type: ignore[attr-defined]
    return call


def of_tensors(operator: Operator) -> Operator | None:
    """What does the same where the first argument is a tensor, and has no bounds to look after."""
    return getattr(operator, "of_tensors", None)


def _takes_plain_values(name: str) -> bool:
    """Also the registered operators of whichever overload fits: some of these take texts."""
    if name.startswith("a:"):
        return "." not in name
    pythons = ("o:", "b:", "M:", "n:operator.", "t:torch.sym_")
    return name.startswith(pythons) or _makes_tensors(name)


def _makes_tensors(name: str) -> bool:
    """Whether it makes tensors of lists: in one go, with all inner ones."""
    is_numpys = name.startswith("n:") and not name.startswith("n:operator.")
    return is_numpys or name in _OF_LISTS


def _at_small_places(operator: Operator) -> Operator:
    @functools.wraps(operator, updated=())
    def call(values: Any, place: Any, *value: Any) -> Any:
        if type(place) is list or (
            type(place) is tuple and not _PLACES.issuperset(map(type, place))
        ):
            _refuse_large((place,), over_rows=False)
        return operator(values, place, *value)

    return call


def _are_small(values: Sequence[Any]) -> bool:
    for value in values:
        if type(value) is int:
            if not _LEAST_SMALL <= value <= _LARGEST_SMALL:
                return False
        elif type(value) not in _OF_ONE_SIZE:
            return False
    return True


def _refuse_large(values: Sequence[Any], *, over_rows: bool) -> None:
    """`over_rows` where a tensor among the values itself is a list of its rows."""
    if over_rows:
        for each in values:
            if isinstance(each, torch.Tensor) and each.dim():
                _spend(_ENTRIES_OF_ROW * len(each))
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, int):
            _refuse_bits(value.bit_length())
        elif isinstance(value, (*_SEQUENCES, dict)):
            _spend(len(value))
            if not isinstance(value, str):
                waiting += value.values() if isinstance(value, dict) else value


def _spend(entries: int) -> None:
    _allowance.entries -= entries
    require(_allowance.entries >= 0, "more than {} entries of lists and texts", _MOST_ENTRIES)


def _refuse_bits(bits: int) -> None:
    require(bits <= _MOST_BITS, "a whole number of more than {} bits", _MOST_BITS)


# --- Results that are larger than all arguments together ---------------------------------------


def _power(base: Any, exp: Any, mod: Any = None) -> None:
    if isinstance(base, int) and isinstance(exp, int) and mod is None:
        _refuse_bits((base.bit_length() - 1) * exp)


def _shifted(number: Any, bits: Any) -> None:
    if isinstance(number, int) and isinstance(bits, int) and number:
        _refuse_bits(number.bit_length() + bits)


def _product(first: Any, second: Any) -> None:
    """A list is repeated by anything that counts, a tensor as well."""
    for values, times in ((first, second), (second, first)):
        if isinstance(values, _SEQUENCES):
            require(isinstance(times, int), "a list, repeated by no number")
            _spend(len(values) * max(times, 0))


def _product_of_all(values: Any, *, start: Any = 1) -> None:
    product: Any = 1  # until a value is no whole number: from there on no product is one
    for each in (start, *values):
        require(not isinstance(each, _SEQUENCES), "a product of lists")
        if isinstance(product, int):
            product = product * each if isinstance(each, int) else None
            _refuse_bits(0 if product is None else product.bit_length())


def _common_multiple(*numbers: Any) -> None:
    multiple = 1
    for each in numbers:
        multiple = math.lcm(multiple, each)
        _refuse_bits(multiple.bit_length())


def _sum(values: Any, start: Any = 0) -> None:
    """Each list is copied as often as there are others behind it."""
    if isinstance(start, _SEQUENCES):
        entries = len(start)
        for each in values:
            entries += len(each) if isinstance(each, _SEQUENCES) else 0
            _spend(entries)


def _part(values: Any, place: Any) -> None:
    """A part of a list is a copy."""
    if isinstance(place, slice) and isinstance(values, _SEQUENCES):
        _spend(len(range(*place.indices(len(values)))))


def _remainder(first: Any, second: Any) -> None:
    """Of a text it is that text with values in it, as wide as the text says."""
    del second
    require(not isinstance(first, str), "a text to be filled in")


def _rounded(number: Any, ndigits: Any = None) -> None:
    """Before the point, powers of ten are computed."""
    if isinstance(number, int) and ndigits is not None:
        require(isinstance(ndigits, int), "a number of digits that is none: {}", ndigits)
        _refuse_bits(abs(ndigits))


_GROWTH: dict[str, Operator] = {
    **dict.fromkeys(("pow", "ipow"), _power),
    **dict.fromkeys(("lshift", "ilshift"), _shifted),
    **dict.fromkeys(("mul", "imul"), _product),
    **dict.fromkeys(("mod", "imod"), _remainder),
    "prod": _product_of_all,
    "lcm": _common_multiple,
    "sum": _sum,
    "getitem": _part,
    "round": _rounded,
}
