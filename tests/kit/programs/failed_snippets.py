"""Many snippets in one test, each in a fork of its own as before."""

from collections.abc import Mapping

import pytest

from tests.kit.programs.snippets import Snippet


def failures_of(shim: Snippet, sources: Mapping[str, str]) -> dict[str, str]:
    """The snippets that fail, with the traceback of each."""
    assert sources
    failures = {}
    for name, source in sources.items():
        try:
            shim(source)
        except pytest.fail.Exception as failure:
            failures[name] = f"{name}\n{failure}"
    return failures
