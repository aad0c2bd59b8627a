"""`gpufaas check`: what of a program, or of a function, runs on the GPU and what not, by line."""

import argparse
import sys
from pathlib import Path

from gateway_ext.providers.process.launch import RUNTIME
from gpufaas.check.report_text import Checked, as_json, as_text
from gpufaas.check.trial_run import TrialRun, run_program
from gpufaas.check.verdicts import judge
from gpufaas.errors import CommandError
from gpufaas.options.gpu_node import add_device_options, device_settings
from gpufaas.options.subparsers import Commands

_HANDLER = "handler.py"
_EXEC_OPTIONS = ("devices", "gpu_memory", "emulate_run", "log_level")


def add_parser(commands: Commands) -> None:
    """Describe the command's options."""
    parser = commands.add_parser(
        "check",
        help="run a script or a function: what is on the GPU, slow, or cannot be done, by line",
        usage="gpufaas check [options] script.py [arguments]\n"
        "       gpufaas check [options] FOLDER/handler.py   its calls are those of example.json",
    )
    add_device_options(parser)
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
    """The device options as arguments for `exec`."""
    values = {name: getattr(options, name) for name in _EXEC_OPTIONS}
    return [
        part
        for name, value in values.items()
        if value is not None
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]
