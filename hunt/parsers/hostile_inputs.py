"""What decoders in C take differently from what our code expects, at every place of a valid input.

Deep nesting, whole numbers that no float holds, numbers without end, halves of surrogate pairs,
keys given twice, lists that claim millions of entries, extension types, aliases of YAML.
"""

import re
from collections.abc import Iterator, Sequence

from hunt.parsers.input_trees import Raw, Tree, copied, in_frame, places, read, written
from hunt.parsers.parser_target import InputForm, Target

_MOST_PLACES = 48
_FIRST_PLACES, _EACH = 4, 6
_MOST_SEEDS = 2
# The interpreter stops at about 1000, less what the caller and the decoder stand on already. What
# is parsed below the limit may be too deep for whoever shows or encodes it: hence the small steps.
DEPTHS = (40, 330, 900, 945, 955, 960, 965, 970, 975, 980, 985, 995, 1_015, 5_000)
_DIGITS = 5_000  # Python reads no number of more than 4300

_NUMBERS = (0, 1, -1, 255, 1 << 31, (1 << 53) + 1, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
_TEXTS = ("", "\0", "a" * 3_000, "é\u0661", "NaN", "1e999", "-1", "0x10", "..", "a/b", " ", "\n")
_VALUES: tuple[Tree, ...] = (
    None, True, False, 0.5, -0.0, 1e308, [], {}, [[]], [{}], {"a": []}, [None, None],
    *_NUMBERS, *_TEXTS,
)  # fmt: skip


def json_values() -> Iterator[Tree]:
    """Values for places in JSON, some of which no encoder of ours writes."""
    yield from _VALUES
    for text in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "9" * 400):
        yield Raw(text.encode())
    for text in ("9" * _DIGITS, '"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '{"a":1,"a":2}'):
        yield Raw(text.encode())
    for depth in DEPTHS:
        yield Raw(b"[" * depth + b"]" * depth)
        yield Raw(b'{"a":' * depth + b"1" + b"}" * depth)


def msgpack_values() -> Iterator[Tree]:
    """Values for places in msgpack, some of which no encoder of ours writes."""
    yield from _VALUES
    yield from (b"", b"\0" * 64, float("inf"), float("-inf"), float("nan"))
    yield Raw(b"\xa1\xff")  # a text that is no UTF-8
    yield Raw(b"\xa3\xed\xa0\x80")  # half a surrogate pair
    yield Raw(b"\x82\xa1a\x01\xa1a\x02")  # a key twice
    yield Raw(b"\x81\x90\x01")  # a list as a key
    yield Raw(b"\x81\x01\x01")  # a number as a key
    yield Raw(b"\x81\xc4\x01a\x01")  # bytes as a key
    yield Raw(b"\xc1")  # what is never used
    yield Raw(b"\xd6\xff\0\0\0\0")  # a timestamp
    yield Raw(b"\xc7\x0c\xff" + b"\xff" * 12)  # one of the year 585 billion
    yield Raw(b"\xd4\x05a")  # another extension type
    yield Raw(b"\xc9\xff\xff\xff\xff\x05")  # one that claims 4 GiB
    yield from (Raw(kind + b"\xff" * 4) for kind in (b"\xdd", b"\xdf", b"\xdb", b"\xc6"))
    yield Raw(b"\xdc\x10\x00" * 300)  # long lists, each the first entry of the one before
    for depth in DEPTHS:
        yield Raw(b"\x91" * depth + b"\xc0")
        yield Raw(b"\x81\xa1a" * depth + b"\xc0")


_TEXT_NUMBERS = (b"9" * 400, b"9" * _DIGITS, b"-1", b"1e999", "\u0661".encode(), b"0x10", b"")
_TEXT_WHOLE = (
    b"", b" ", b"\n", b"\0", b"\xff\xfe", b"a" * 60_000, bytes(range(256)) * 16, b"\r\n" * 9_000,
    b"[" * 3_000, b"{" * 3_000, b"(" * 3_000, b"a: [" * 3_000, b"- " * 3_000, b"," * 30_000,
    b"a=b," * 9_000, b"a: &a [1]\nb: *a\n", b"9" * 60_000, b"%" * 30_000, b"'" * 3_000,
    b'"' * 3_001, b";" * 30_000, b"a\n" * 20_000, b"x: 1\n" * 9_000, b"a," * 150_000,
)  # fmt: skip
_PACKED = (b"\xc0", b"\x01", b"\xa1a", b"\x90", b"\x80")  # nil, 1, a text, an empty list and map
_ALIASES = b"a: &a [x,x]\n" + b"".join(
    b"%c: &%c [*%c,*%c,*%c]\n" % (at, at, at - 1, at - 1, at - 1) for at in range(98, 123)
)
_NUMBER = re.compile(rb"\d+")


def hostile_inputs(target: Target) -> Iterator[bytes]:
    """Inputs that the parser has to survive, by the form of what it reads."""
    for data in _of_form(target.form, target.seeds()):
        yield data[: target.most_bytes]


def _of_form(form: InputForm, seeds: Sequence[bytes]) -> Iterator[bytes]:
    match form:
        case InputForm.JSON:
            yield from _replaced(form, seeds, list(json_values()))
        case InputForm.MSGPACK | InputForm.FRAME:
            yield from _replaced(form, seeds, list(msgpack_values()))
        case InputForm.TEXT | InputForm.BINARY:
            yield from _TEXT_WHOLE
            yield _ALIASES
    for seed in seeds:
        yield from (seed[:at] for at in range(0, len(seed), 1 + len(seed) // 24))
        if form in (InputForm.TEXT, InputForm.BINARY):
            yield from _with_numbers(seed)
    yield from _PACKED


def _replaced(form: InputForm, seeds: Sequence[bytes], values: Sequence[Tree]) -> Iterator[bytes]:
    """Every value as the whole input, and in the place of every part of a valid one.

    Of places that are further in, each has some of the values.
    """
    for seed in seeds[:_MOST_SEEDS]:
        holder, rest = read(form, seed)
        for at in range(min(_MOST_PLACES, len(places(holder)))):
            some = values if at < _FIRST_PLACES else values[at % _EACH :: _EACH]
            for value in some:
                changed = copied(holder)
                container, key = places(changed)[at]
                container[key] = value
                data = written(form, changed)
                yield in_frame(seed, data) if form is InputForm.FRAME else data + rest


def _with_numbers(seed: bytes) -> Iterator[bytes]:
    for found in list(_NUMBER.finditer(seed))[:_MOST_PLACES]:
        for number in _TEXT_NUMBERS:
            yield seed[: found.start()] + number + seed[found.end() :]
