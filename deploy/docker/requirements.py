"""Prints what an extra of pyproject.toml requires: `requirements.py EXTRA [LEFT OUT ...]`."""

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9._-]+")


def required(project: str, extra: str, without: Sequence[str]) -> list[str]:
    """The extra's requirements, but for the packages that an image does not need."""
    extras: dict[str, list[str]] = tomllib.loads(project)["project"]["optional-dependencies"]
    names = [_name(each) for each in extras[extra]]
    unknown = sorted(set(without) - set(names))
    if unknown:
        raise SystemExit(f"{extra} does not require {', '.join(unknown)}")
    return [each for each in extras[extra] if _name(each) not in without]


def _name(requirement: str) -> str:
    found = _NAME.match(requirement)
    assert found, f"pyproject.toml names packages: {requirement!r}"
    return found[0]


if __name__ == "__main__":
    lines = required(Path("pyproject.toml").read_text(encoding="utf-8"), sys.argv[1], sys.argv[2:])
    sys.stdout.write("".join(f"{line}\n" for line in lines))
