"""`gpufaas check`: what of a program's CUDA uses will be redirected, line by line."""

import argparse
import sys
from pathlib import Path

from gpufaas.arguments import Commands
from gpufaas.check.findings import told_once
from gpufaas.check.judge import judge
from gpufaas.check.run import Ran, run
from gpufaas.check.shown import Checked, as_json, as_text
from gpufaas.check.sources import read_project
from gpufaas.check.uses import uses_in
from gpufaas.devices import add_device_options, node_settings
from gpufaas.errors import CommandError

_PASSED_ON = (
    "devices",
    "gpu_memory",
    "store_memory",
    "policy",
    "emulate_load",
    "emulate_run",
    "log_level",
)


def add_parser(commands: Commands) -> None:
    """Describe the command's options."""
    parser = commands.add_parser(
        "check",
        help="which CUDA uses of a script work, which are slow, which cannot be done",
        usage="gpufaas check [options] script.py [arguments]",
    )
    add_device_options(parser)
    add = parser.add_argument
    add("--static", action="store_true", help="only read the script, do not run it")
    add("--json", action="store_true", help="print one JSON object")
    add("--python", default=sys.executable, metavar="PROGRAM", help="what runs the script")
    add("script", help="a Python script")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    project = read_project(Path(options.script))
    found = [use for path, tree in project.items() for use in uses_in(str(path), tree)]
    ran = None if options.static else _ran(options)
    if ran is not None:
        found += judge(ran)
    checked = Checked(options.script, list(project), list(told_once(found)), ran)
    print(as_json(checked) if options.json else as_text(checked))
    return 0 if checked.passes else 1


def _ran(options: argparse.Namespace) -> Ran:
    node_settings(options, "local", ())  # refuses bad values before anything is started
    if not Path(options.script).is_file():
        raise CommandError(f"{options.script}: no such file")
    program = [options.python, options.script, *options.arguments]
    return run(program, _passed_on(options), options.environment, quiet=options.json)


def _passed_on(options: argparse.Namespace) -> list[str]:
    """The options about devices, as `exec` takes them."""
    values = {name: getattr(options, name) for name in _PASSED_ON}
    return [
        part
        for name, value in values.items()
        if value is not None
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
