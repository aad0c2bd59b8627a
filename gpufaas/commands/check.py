"""`gpufaas check`: what of a program, or of a function, runs on the GPU and what not, by line."""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gateway_ext.providers.process.launch import RUNTIME
from gpufaas.check.trial_run import TrialRun, run_program
from gpufaas.check.verdicts import Finding, counted, judge, outside_graphs, share_in_graphs
from gpufaas.errors import CommandError
from gpufaas.extras import require_torch
from gpufaas.options.gpu_node import (
    add_device_options,
    add_stack_option,
    device_settings,
    refuse_devices,
)
from gpufaas.options.shared import Commands

_HANDLER = "handler.py"
_EXEC_OPTIONS = ("devices", "gpu_memory", "emulate_run", "log_level")


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "check",
        help="run a script or a function: what is on the GPU, slow, or cannot be done, by line",
        usage="gpufaas check [options] script.py [arguments]\n"
        "       gpufaas check [options] FOLDER/handler.py   its calls are those of example.json",
    )
    add_device_options(parser)
    add_stack_option(parser)
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object")
    add("--python", default=sys.executable, metavar="PROGRAM", help="what runs the script")
    add("script", help="a Python script, or the handler.py of a function")
    # Not required, whatever argparse takes of it.
    add("arguments", nargs=argparse.REMAINDER, help="its arguments").required = False
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    ran = _trial_run(options)
    checked = Checked(options.script, judge(ran), ran)
    print(as_json(checked) if options.json else as_text(checked))
    return 0 if checked.passes else 1


def _trial_run(options: argparse.Namespace) -> TrialRun:
    device_settings(options, "local", ())  # refuse invalid values before a process starts
    if not options.stack:
        require_torch()
    if not Path(options.script).is_file():
        raise CommandError(f"{options.script}: no such file")
    program = [options.python, options.script, *options.arguments]
    environment = dict(options.environment)
    handler = Path(options.script).absolute()
    if handler.name == _HANDLER:
        program = [options.python, str(RUNTIME), "--examples"]
        environment["GPUFAAS_HANDLER"] = str(handler.parent)
    return run_program(program, _exec_options(options), environment, quiet=options.json)


def _exec_options(options: argparse.Namespace) -> list[str]:
    values = {name: getattr(options, name) for name in _EXEC_OPTIONS}
    if options.stack:
        refuse_devices(options)
        return ["--stack", "--log-level", options.log_level]
    return [
        part
        for name, value in values.items()
        if value
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]


_WIDTH = 100
# Titles of the findings that were seen so, had this outcome, and are heavy or not.
_GROUPS = (
    ("runs on the CPU", ("run", "local", False)),
    ("graph breaks: a graph ends, a round trip more", ("break", "local", False)),
    ("heavy, on the function's own processor", ("run", "local", True)),
    ("cannot be done", ("run", "cannot", False)),
)


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
    findings = sorted(checked.findings, key=lambda f: (f.file, f.line, f.what))
    folder = Path(checked.script).resolve().parent
    ran = checked.run
    lines = [f"{checked.script}: ran in {ran.took_s:.1f} s, exit code {ran.code}", ""]
    for title, kind in _GROUPS:
        if group := [f for f in findings if (f.seen, f.outcome, f.heavy) == kind]:
            lines += [f"{title}: {len(group)}", *_rows(group, folder), ""]
    return "\n".join([*lines, *_of_run(ran), "", _verdict(checked)])


def as_json(checked: Checked) -> str:
    ran = checked.run
    return json.dumps(
        {
            "script": checked.script,
            "passes": checked.passes,
            "findings": [asdict(finding) for finding in checked.findings],
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


def _rows(group: Sequence[Finding], folder: Path) -> Iterator[str]:
    by_advice: dict[str, list[tuple[str, str]]] = {}
    for finding in group:
        advice = "; ".join(part for part in (finding.why, finding.remedy) if part)
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
        here = counted(ran.local_operators, "operator")
        yield (
            f"{share:.1%} of the modules' operators in graphs: {ran.graph_operators:,} in "
            f"{counted(ran.graph_calls, 'call')}, {here} here"
        )
    outside = outside_graphs(ran)
    calls, seconds = outside["calls"], outside["seconds"]
    yield f"outside of graphs, on the CPU: {calls:,.0f} operators, {seconds:.3f} s"


def _verdict(checked: Checked) -> str:
    cannot = sum(f.outcome == "cannot" for f in checked.findings)
    heavy = sum(f.heavy for f in checked.findings)
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
