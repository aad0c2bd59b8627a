"""The table of docs/fuzzing.md: every parser, who writes what it reads, and its bounds."""

from collections.abc import Iterable
from pathlib import Path

from hunt.parsers.parser_target import Target
from tests.kit.places import ROOT

PAGE = ROOT / "docs" / "fuzzing.md"
_BEGIN, _END = "<!-- parsers begin -->\n", "<!-- parsers end -->"
_MIB = 1 << 20
_HEAD = "| parser | who writes it | what bounds it | memory | comes back |"


def table(targets: Iterable[Target]) -> str:
    """The rows, in Markdown."""
    lines = [
        "| parser | who writes it | what bounds it | memory | comes back |",
        "|" + " --- |" * 5,
    ]
    for target in targets:
        back = "" if target.encode is None else "yes"
        cells = target.name, target.sender, target.bound, _memory(target), back
        lines.append(f"| {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def written_table(page: Path = PAGE) -> str:
    """The table that the page has."""
    return page.read_text(encoding="utf-8").partition(_BEGIN)[2].partition(_END)[0]


def write_table(targets: Iterable[Target], page: Path = PAGE) -> None:
    """Replace the page's table."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    page.write_text(before + begin + table(targets) + end + after, encoding="utf-8")


def _memory(target: Target) -> str:
    """The most that it may take."""
    return f"{target.memory_factor} a byte + {max(1, target.memory_bytes // _MIB)} MiB"
