"""`gpufaas models`, `evict`, `pin` and `unpin`: what a running GPU manager holds."""

import argparse
import json
import time
from typing import Any

from gpu_manager.api import format_size
from gpufaas.administrator import ask, default_address
from gpufaas.arguments import Commands

_HEAD = ("MODEL", "FUNCTIONS", "WHERE", "BYTES", "SINCE", "USES", "LAST USED", "PINNED")
_ORDERS = {
    "evict": "take a model out of GPU memory",
    "pin": "keep a model in GPU memory; with --gpu, load it there if need be",
    "unpin": "let a pinned model be evicted again",
}
_MINUTE_S, _HOUR_S = 60, 3600


def add_parser(commands: Commands) -> None:
    """Describe the commands' options."""
    parser = commands.add_parser("models", help="the models that a GPU manager holds")
    _add_common_options(parser)
    parser.set_defaults(run=_models)
    for name, help_text in _ORDERS.items():
        parser = commands.add_parser(name, help=help_text)
        parser.add_argument("model", help="its id or digest, or their beginning, or a function")
        parser.add_argument("--gpu", help="on this GPU alone")
        _add_common_options(parser)
        parser.set_defaults(run=_order)


def _add_common_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--address", help="of the GPU manager (unix:/run/gpufaas/node.sock)")
    add("--credential", default="", help="the administrator's, where it is another user's")
    add("--json", action="store_true", help="print JSON")


def _models(options: argparse.Namespace) -> int:
    rows = _ask(options, do="models")["models"]
    print(json.dumps(rows, indent=1) if options.json else table(rows))
    return 0


def _order(options: argparse.Namespace) -> int:
    answer = _ask(options, do=options.command, model=options.model, gpu=options.gpu)
    print(json.dumps(answer) if options.json else f"{options.command}: {answer['model']}")
    return 0


def _ask(options: argparse.Namespace, **fields: str | None) -> dict[str, Any]:
    address = options.address or default_address(options.environment)
    return ask(address, options.credential, **fields)


def table(rows: list[dict[str, Any]]) -> str:
    """A line a model and GPU, in columns."""
    lines = [_HEAD, *(_line(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    padded = ("  ".join(map(str.ljust, line, widths)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["model"],
        row["label"],
        row["gpu"] or row["tier"],
        format_size(row["bytes"] or row["weights_bytes"]),
        _ago(row["since"]),
        str(row["uses"]),
        _ago(row["used"]) if row["uses"] else "-",
        "yes" if row["pinned"] else "",
    )


def _ago(moment_s: float | None) -> str:
    """How long ago that was."""
    if moment_s is None:
        return "-"
    seconds = max(0.0, time.time() - moment_s)
    if seconds < _MINUTE_S:
        return f"{seconds:.0f} s"
    return f"{seconds / _MINUTE_S:.0f} min" if seconds < _HOUR_S else f"{seconds / _HOUR_S:.1f} h"
