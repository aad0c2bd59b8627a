"""A check's result as text and as JSON."""

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpufaas.check.findings import Finding, FoundBy, UseOutcome, of_outcome
from gpufaas.check.trial_run import TrialRun
from gpufaas.check.verdicts import outside_graphs, share_in_graphs

_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Checked:
    """A checked program, its findings and its run."""

    script: str
    findings: Sequence[Finding]
    run: TrialRun

    @property
    def passes(self) -> bool:
        """Whether the run succeeded, without refusals and without heavy work on the CPU."""
        return not self.run.code and not any(finding.is_problem for finding in self.findings)


def as_text(checked: Checked) -> str:
    """The findings in groups, one line each, problems last."""
    found = [finding for finding in checked.findings if finding.seen is FoundBy.RUN]
    breaks = [finding for finding in checked.findings if finding.seen is FoundBy.BREAK]
    groups = [
        ("runs on the CPU", of_outcome(found, UseOutcome.LOCAL)),
        ("graph breaks: a graph ends, a round trip more", of_outcome(breaks, UseOutcome.LOCAL)),
        ("heavy, on the function's own processor", of_outcome(found, UseOutcome.LOCAL, heavy=True)),
        ("cannot be done", of_outcome(found, UseOutcome.CANNOT)),
    ]
    folder = Path(checked.script).resolve().parent
    ran = checked.run
    lines = [f"{checked.script}: ran in {ran.took_s:.1f} s, exit code {ran.code}", ""]
    for title, group in groups:
        if group:
            lines += [f"{title}: {len(group)}", *_rows(group, folder), ""]
    return "\n".join([*lines, *_of_run(ran), "", _verdict(checked)])


def as_json(checked: Checked) -> str:
    """The result as JSON, with each fact in its own field."""
    ran = checked.run
    return json.dumps(
        {
            "script": checked.script,
            "passes": checked.passes,
            "findings": [_fields(finding) for finding in checked.findings],
            "run": {
                "exit_code": ran.code,
                "graph_calls": ran.graph_calls,
                "graph_operators": ran.graph_operators,
                "local_operators": ran.local_operators,
                "share_in_graphs": share_in_graphs(ran),
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
    """One line for each finding, grouped by their advice."""
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
    """A file's path relative to the script's folder or to its package."""
    path = Path(file)
    if path.is_relative_to(folder):
        return str(path.relative_to(folder))
    return file.rpartition("site-packages/")[2]


def _of_run(ran: TrialRun) -> Iterator[str]:
    share = share_in_graphs(ran)
    if share is None and not ran.code:
        yield "no module, and no function under torch.compile, ran on the GPU: all of it ran on the"
        yield "function's own processor; put torch.compile around what computes"
        yield "(of processes that end by os._exit nothing is known)"
    elif share is not None:
        here = _counted(ran.local_operators, "operator")
        yield (
            f"{share:.1%} of the modules' operators in graphs: {ran.graph_operators:,} in "
            f"{_counted(ran.graph_calls, 'call')}, {here} here"
        )
    outside = outside_graphs(ran)
    calls, seconds = outside["calls"], outside["seconds"]
    yield f"outside of graphs, on the CPU: {calls:,.0f} operators, {seconds:.3f} s"


def _verdict(checked: Checked) -> str:
    cannot = sum(f.rule.outcome is UseOutcome.CANNOT for f in checked.findings)
    heavy = sum(f.rule.heavy for f in checked.findings)
    wrong = [
        *([f"{cannot} that cannot be done"] if cannot else []),
        *([f"{heavy} heavy on the function's own processor"] if heavy else []),
        *(["the program failed"] if checked.run.code else []),
    ]
    if wrong:
        return f"to change: {', '.join(wrong)}"
    if not checked.run.graph_operators:
        return "nothing ran on the GPU: compute in the forward of an nn.Module that is on 'cuda'"
    return "nothing stands in the way"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
