"""Changes inputs at random: trees by their values, text by its words and numbers, bytes by bits."""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from hunt.parsers.hostile_inputs import json_values, msgpack_values
from hunt.parsers.input_trees import (
    Tree,
    Unreadable,
    copied,
    in_frame,
    places,
    read,
    written,
)
from hunt.parsers.parser_target import InputForm

_MOST_CHANGES = 4
_AS_BYTES = 0.15  # of the inputs that are trees
_WORD = re.compile(rb"[A-Za-z_][\w.-]*|\d+|[^\w\s]+|\s+")
_NUMBERS = (b"0", b"1", b"-1", b"255", b"256", b"65535", b"2147483648", b"9223372036854775808")
_HIGH_DIGITS = b"9" * 400
_FEW = 32
_LONG = 100  # elements of a list; of a longer one forty times as many are no other case


class Mutations:
    """Changed inputs of one form; words and parts come from all inputs that were shown to it."""

    def __init__(self, form: InputForm, chance: random.Random, most_bytes: int) -> None:
        self._form = form
        self._chance = chance
        self._most_bytes = most_bytes
        self._words: list[bytes] = []
        self._known_words: set[bytes] = set()
        self._values: list[Tree] = list(
            json_values() if form is InputForm.JSON else msgpack_values()
        )
        self._keys: list[Any] = []

    def show(self, data: bytes) -> None:
        """Learn the words of an input, or the keys of its tree."""
        if self._is_tree:
            try:
                holder, _ = read(self._form, data)
            except Unreadable:
                pass
            else:
                self._keys += [key for where, key in places(holder) if isinstance(where, dict)]
        for word in _WORD.findall(data[: self._most_bytes])[:_FEW]:
            if word not in self._known_words and len(word) <= _FEW:
                self._known_words.add(word)
                self._words.append(word)

    def changed(self, data: bytes, donor: bytes) -> bytes:
        """The input with a few changes; parts of the donor may take the place of its own."""
        count = self._chance.randint(1, _MOST_CHANGES)
        if self._is_tree and self._chance.random() > _AS_BYTES:
            try:
                return self._changed_tree(data, donor, count)[: self._most_bytes]
            except (Unreadable, RecursionError):  # by now it is no tree any more
                pass
        for _ in range(count):
            data = self._chance.choice(self._OF_BYTES)(self, data, donor)[: self._most_bytes]
        return data

    @property
    def _is_tree(self) -> bool:
        return self._form not in (InputForm.TEXT, InputForm.BINARY)

    # -- trees ----------------------------------------------------------------------------------

    def _changed_tree(self, data: bytes, donor: bytes, count: int) -> bytes:
        holder, rest = read(self._form, data)
        given, _ = read(self._form, donor)
        holder = copied(holder)
        for _ in range(count):
            container, key = self._chance.choice(places(holder))
            self._chance.choice(self._OF_TREES)(self, container, key, given)
            if not holder:
                holder.append(None)
        packed = written(self._form, holder, self._most_bytes)
        return in_frame(data, packed) if self._form is InputForm.FRAME else packed + rest

    def _hostile(self, container: Any, key: Any, _: list[Tree]) -> None:
        container[key] = self._chance.choice(self._values)

    def _given(self, container: Any, key: Any, given: list[Tree]) -> None:
        where, at = self._chance.choice(places(given))
        container[key] = copied(where[at])

    def _left_out(self, container: Any, key: Any, _: list[Tree]) -> None:
        del container[key]

    def _twice(self, container: Any, key: Any, _: list[Tree]) -> None:
        value = copied(container[key])
        if isinstance(container, list):
            container.insert(key, value)
        else:
            container[self._chance.choice(self._keys or ["x"])] = value

    def _wrapped(self, container: Any, key: Any, _: list[Tree]) -> None:
        value = container[key]
        container[key] = [value] if self._chance.random() < 0.5 else {"a": value}

    def _varied(self, container: Any, key: Any, _: list[Tree]) -> None:
        value = container[key]
        if isinstance(value, bool):
            container[key] = not value
        elif isinstance(value, int):
            container[key] = value + self._chance.choice((-1, 1, 1000, -value, 1 << 40))
        elif isinstance(value, float):
            container[key] = value * self._chance.choice((-1.0, 0.0, 1e300, 0.5))
        elif isinstance(value, str):
            container[key] = self._text(value)
        elif isinstance(value, bytes):
            container[key] = self._chance.choice(self._OF_BYTES)(self, value, value)
        elif isinstance(value, list):
            times = (0, 2, 40) if len(value) < _LONG else (0, 2)
            container[key] = value * self._chance.choice(times)
        elif isinstance(value, dict):
            container[key] = dict(list(value.items())[1:])

    def _text(self, value: str) -> str:
        changed = self._chance.choice(self._OF_BYTES)(self, value.encode("utf-8", "replace"), b"x")
        return changed.decode("utf-8", "replace")

    # -- bytes ----------------------------------------------------------------------------------

    def _flipped(self, data: bytes, _: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + bytes([self._chance.randrange(256)]) + data[at + 1 :]

    def _word_put_in(self, data: bytes, _: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + self._chance.choice(self._words or [b"a"]) + data[at:]

    def _word_replaced(self, data: bytes, _: bytes) -> bytes:
        found = self._found(_WORD, data)
        word = self._chance.choice(self._words or [b"a"])
        return data if found is None else data[: found.start()] + word + data[found.end() :]

    def _number_replaced(self, data: bytes, _: bytes) -> bytes:
        found = self._found(re.compile(rb"\d+"), data)
        number = self._chance.choice((*_NUMBERS, _HIGH_DIGITS))
        return data if found is None else data[: found.start()] + number + data[found.end() :]

    def _cut_out(self, data: bytes, _: bytes) -> bytes:
        begin, end = sorted((self._at(data), self._at(data)))
        return data[:begin] + data[end:]

    def _repeated(self, data: bytes, _: bytes) -> bytes:
        begin, end = sorted((self._at(data), self._at(data)))
        times = self._chance.choice((1, 1, 2, 50))
        most = self._most_bytes // max(1, end - begin) + 1
        return data[:end] + data[begin:end] * min(times, most) + data[end:]

    def _spliced(self, data: bytes, donor: bytes) -> bytes:
        return data[: self._at(data)] + donor[self._at(donor) :]

    def _at(self, data: bytes) -> int:
        return self._chance.randint(0, len(data))

    def _found(self, pattern: re.Pattern[bytes], data: bytes) -> re.Match[bytes] | None:
        return pattern.search(data, self._at(data)) or pattern.search(data)

    _OF_TREES: ClassVar[Sequence[Callable[..., None]]] = (
        *(_hostile, _hostile, _given, _left_out, _twice, _wrapped, _varied, _varied),
    )
    _OF_BYTES: ClassVar[Sequence[Callable[..., bytes]]] = (
        *(_flipped, _word_put_in, _word_replaced, _number_replaced),
        *(_cut_out, _repeated, _spliced),
    )
