"""A check's result for a person to read, and as JSON."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpufaas.check.findings import Finding, Outcome, Seen, of_outcome
from gpufaas.check.judge import outside_graphs, share_in_graphs
from gpufaas.check.run import Ran

_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Checked:
    """A program's check."""

    script: str
    files: Sequence[Path]
    findings: Sequence[Finding]
    ran: Ran | None

    @property
    def passes(self) -> bool:
        """Whether nothing stands in the way: no refusal, no heavy piece on this processor."""
        failed = self.ran is not None and self.ran.code != 0
        return not failed and not any(finding.is_problem for finding in self.findings)


def as_text(checked: Checked) -> str:
    """One line an item, in groups, what stands in the way last."""
    found = [finding for finding in checked.findings if finding.seen is not Seen.BREAK]
    breaks = [finding for finding in checked.findings if finding.seen is Seen.BREAK]
    groups = [
        ("redirected to the GPU", of_outcome(found, Outcome.REDIRECTED)),
        ("answered in the function", of_outcome(found, Outcome.LOCAL)),
        ("graph breaks: a graph ends, a round trip more", of_outcome(breaks, Outcome.LOCAL)),
        ("heavy, on the function's own processor", of_outcome(found, Outcome.LOCAL, heavy=True)),
        ("cannot be done", of_outcome(found, Outcome.CANNOT)),
    ]
    folder = Path(checked.script).resolve().parent
    lines = [f"{checked.script}: {_counted(len(checked.files), 'file')} read", ""]
    for title, group in groups:
        if group:
            lines += [f"{title}: {len(group)}", *_rows(group, folder), ""]
    if checked.ran is not None:
        lines += [*_of_run(checked.ran), ""]
    return "\n".join([*lines, _verdict(checked)])


def as_json(checked: Checked) -> str:
    """The same with every fact in a field of its own."""
    ran = checked.ran
    share = None if ran is None else share_in_graphs(ran)
    return json.dumps(
        {
            "script": checked.script,
            "passes": checked.passes,
            "files": [str(path) for path in checked.files],
            "findings": [_fields(finding) for finding in checked.findings],
            "run": ran
            and {
                "exit_code": ran.code,
                "graph_calls": ran.graph_calls,
                "graph_operators": ran.graph_operators,
                "local_operators": ran.local_operators,
                "share_in_graphs": share,
                "outside_graphs": outside_graphs(ran),
            },
        },
        indent=2,
    )


def _fields(finding: Finding) -> dict[str, object]:
    rule = finding.rule
    return {
        "outcome": rule.outcome,
        "heavy": rule.heavy,
        "file": finding.file,
        "line": finding.line,
        "what": finding.what,
        "why": rule.why,
        "remedy": rule.remedy,
        "seen": finding.seen,
    }


def _rows(group: Sequence[Finding], folder: Path) -> Iterator[str]:
    """One line an item: its place and what it is, under the advice that it shares with others."""
    by_advice: dict[str, list[tuple[str, str]]] = {}
    for finding in group:
        advice = "; ".join(part for part in (finding.rule.why, finding.rule.remedy) if part)
        place = f"{_short(finding.file, folder)}:{finding.line}"
        by_advice.setdefault(advice, []).append((place, finding.what))
    for advice, items in by_advice.items():
        indent = "  "
        if advice:
            yield from textwrap.wrap(
                advice, _WIDTH, initial_indent=indent, subsequent_indent=indent
            )
            indent = "    "
        width = max(len(place) for place, _ in items)
        yield from (f"{indent}{place:<{width}}  {what}"[:_WIDTH] for place, what in items)


def _short(file: str, folder: Path) -> str:
    """A file's name from the script's folder, or in its package."""
    path = Path(file)
    if path.is_relative_to(folder):
        return str(path.relative_to(folder))
    return file.rpartition("site-packages/")[2]


def _of_run(ran: Ran) -> Iterator[str]:
    yield f"ran in {ran.took_s:.1f} s, exit code {ran.code}"
    share = share_in_graphs(ran)
    if share is None:
        yield "no call of a module was counted (processes that leave by os._exit tell nothing)"
    else:
        here = _counted(ran.local_operators, "operator")
        yield (
            f"{share:.1%} of the modules' operators in graphs: {ran.graph_operators:,} in "
            f"{_counted(ran.graph_calls, 'call')}, {here} here"
        )
    outside = outside_graphs(ran)
    yield f"outside of graphs: {outside['calls']:,.0f} operators, {outside['seconds']:.3f} s"


def _verdict(checked: Checked) -> str:
    cannot = sum(f.rule.outcome is Outcome.CANNOT for f in checked.findings)
    heavy = sum(f.rule.heavy for f in checked.findings)
    failed = checked.ran is not None and checked.ran.code != 0
    wrong = [
        *([f"{cannot} that cannot be done"] if cannot else []),
        *([f"{heavy} heavy on the function's own processor"] if heavy else []),
        *(["the program failed"] if failed else []),
    ]
    return f"to change: {', '.join(wrong)}" if wrong else "nothing stands in the way"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
