"""The commands in docs/kubernetes.md, as people type them."""

import re
from textwrap import dedent

from tests.kit.places import ROOT

_PAGE = ROOT / "docs" / "kubernetes.md"
_BLOCK = re.compile(r"^( *)```sh\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def commands(heading: str) -> list[str]:
    """The commands below a heading, one a text; one that goes on in the background ends with &."""
    page = _PAGE.read_text(encoding="utf-8")
    (found,) = re.findall(
        rf"^### {re.escape(heading)}\n(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE
    )
    blocks = [dedent(text) for _, text in _BLOCK.findall(found)]
    assert blocks, f"no commands below {heading}"
    return [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
