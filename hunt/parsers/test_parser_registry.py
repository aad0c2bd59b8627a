"""What decodes what others wrote is fuzzed, or says why it is not, and the page names it."""

import ast
from collections import Counter
from pathlib import Path

from hunt.parsers.kept_inputs import CORPUS, REGRESSIONS, kept_of
from hunt.parsers.parser_table import table, written_table
from hunt.parsers.registry import NOT_FUZZED, PRODUCT, all_targets
from tests.kit.places import ROOT

# What a decoder is called, wherever it comes from.
_DECODERS = frozenset(
    {
        *("from_json", "unpack", "unpack_from", "decoded"),
        *("safe_load", "DictReader", "b64decode", "urlsafe_b64decode"),
        *("HttpRequestParser", "HttpResponseParser", "parse_qs", "parse_qsl", "urlsplit", "URL"),
        *("fromisoformat", "fromhex", "literal_eval", "Decoder"),
    }
)
_OF_MODULES = frozenset(
    {
        *(("json", "loads"), ("json", "load"), ("tomllib", "load"), ("csv", "reader")),
        *(("json", "decode"), ("yaml", "compose")),  # the first of msgspec
    }
)
_MOST_BYTES = 1 << 20

TARGETS = all_targets()


def test_every_module_that_decodes_is_fuzzed_or_says_why_not() -> None:
    covered = {path for target in TARGETS for path in target.reads}
    decoding = {path for path in _modules() if _decodes(ROOT / path)}

    assert not decoding - covered - NOT_FUZZED.keys()
    assert not NOT_FUZZED.keys() & covered
    assert not NOT_FUZZED.keys() - decoding
    assert not {path for path in covered if not (ROOT / path).is_file()}


def test_no_two_targets_have_one_name() -> None:
    names = Counter(target.name for target in TARGETS)

    assert max(names.values()) == 1


def test_kept_inputs_are_of_targets_and_few() -> None:
    names = {target.name for target in TARGETS}

    for path in (CORPUS, REGRESSIONS):
        assert kept_of(path).keys() <= names
    assert CORPUS.stat().st_size + REGRESSIONS.stat().st_size < _MOST_BYTES


def test_page_has_the_table_of_all_parsers() -> None:
    assert written_table() == table(TARGETS)


def _modules() -> list[str]:
    return [
        str(path.relative_to(ROOT))
        for folder in PRODUCT
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def _decodes(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(_is_decoder(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call))


def _is_decoder(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in _DECODERS
    if not isinstance(function, ast.Attribute):
        return False
    owner = getattr(function.value, "id", getattr(function.value, "attr", ""))
    return function.attr in _DECODERS or (owner, function.attr) in _OF_MODULES
