"""Prints what pyproject.toml requires with an extra: `requirements.py EXTRA [LEFT OUT ...]`."""

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[A-Za-z0-9._-]+")


def required(project: str, extra: str, without: Sequence[str]) -> list[str]:
    """Those of everybody and the extra's, but for the packages that an image does not need."""
    table: dict[str, Any] = tomllib.loads(project)["project"]
    found: list[str] = [*table["dependencies"], *table["optional-dependencies"][extra]]
    names = [_name(each) for each in found]
    unknown = sorted(set(without) - set(names))
    if unknown:
        raise SystemExit(f"{extra} does not require {', '.join(unknown)}")
    return [each for each in found if _name(each) not in without]


def _name(requirement: str) -> str:
    found = _NAME.match(requirement)
    assert found, f"pyproject.toml names packages: {requirement!r}"
    return found[0]


if __name__ == "__main__":
    lines = required(Path("pyproject.toml").read_text(encoding="utf-8"), sys.argv[1], sys.argv[2:])
    sys.stdout.write("".join(f"{line}\n" for line in lines))
