"""The body that is sent to a function if nothing else is said."""

import json
from pathlib import Path

import pytest

from gpufaas.errors import CommandError
from gpufaas.stack.examples import example_body
from tests.kit.places import ROOT


def test_body_is_that_of_the_first_call(tmp_path: Path) -> None:
    assert example_body(tmp_path) == b""
    (tmp_path / "example.json").write_text('[{"body": {"a": 1}}, {"body": "text"}]')
    assert json.loads(example_body(tmp_path)) == {"a": 1}


def test_error_names_the_function(tmp_path: Path) -> None:
    (tmp_path / "example.json").write_text('{"pixels": []}')
    with pytest.raises(CommandError, match=rf"{tmp_path}: example.json: unknown: pixels"):
        example_body(tmp_path)


@pytest.mark.parametrize("name", ["classify", "generate", "pipeline", "hello"])
def test_functions_of_the_stack_have_one(name: str) -> None:
    assert json.loads(example_body(ROOT / "functions" / name))
