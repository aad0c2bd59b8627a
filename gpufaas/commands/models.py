"""`gpufaas models`, `evict`, `pin`, `unpin`, `prefetch`: models in a manager or a cluster."""

import argparse
import time
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from common.numerals import format_size
from gpufaas.errors import CommandError
from gpufaas.options.shared import Commands, print_answer
from gpufaas.output.cells import Row, columns, table
from gpufaas.output.cluster_text import functions_text, hosting_text, hostings_text
from gpufaas.output.request_text import rest_text
from gpufaas.remote.manager_api import request_admin
from gpufaas.remote.scheduler_api import add_scheduler_options, in_path, scheduler_api
from scheduler.client.operator_client import GIVEN_ONCE
from scheduler.model.errors import UnknownModel

_CONFIGURED_HEAD = ("BATCH", "VCPUS", "VGPUS", "GPU TYPE", "RUN")
_ORDERS = {
    "evict": "take a model out of GPU memory",
    "pin": "keep a model in GPU memory; with --gpu, load it there if needed",
    "unpin": "let a pinned model be evicted again",
    "prefetch": "load a model ahead of its requests; a scheduler does it",
}
_MINUTE_S, _HOUR_S = 60, 3600


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("models", help="the models that a GPU manager or cluster holds")
    which = "this one alone, or a function's; a cluster's with all its facts"
    parser.add_argument("model", nargs="?", help=which)
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
    add("--address", help="of a GPU manager, which is asked instead of the scheduler")
    add("--credential", default="", help="the administrator's, where it is another user's")
    add_scheduler_options(parser)


def _models(options: argparse.Namespace) -> int:
    if options.address is None:
        api = scheduler_api(options)
        models = _named(api.get("/models"), options.model)
        if not options.model:
            return print_answer(models, options, cluster_table)
        models = [api.get(f"/models/{in_path(row['model'])}") for row in models]
        return print_answer(models, options, lambda _: "\n\n".join(map(cluster_detail, models)))
    rows = request_admin(options.address, options.credential, do="models")["models"]
    return print_answer(_named(rows, options.model), options, node_table)


def _order(options: argparse.Namespace) -> int:
    if options.address is None:
        path = f"/models/{in_path(options.model)}/{options.command}"
        once = options.command in GIVEN_ONCE
        done = scheduler_api(options).post(path, once=once, gpu=options.gpu)
        text = f"{done['done']}: {done['model']}"
        return print_answer(done, options, lambda _: text, indent=None)
    if options.command == "prefetch":
        raise CommandError("a scheduler prefetches, no GPU manager: leave out --address")
    order = {"do": options.command, "model": options.model, "gpu": options.gpu}
    answer = request_admin(options.address, options.credential, **order)
    text = f"{options.command}: {answer['model']}"
    return print_answer(answer, options, lambda _: text, indent=None)


def _named(rows: list[dict[str, Any]], name: str | None) -> list[dict[str, Any]]:
    """Those whose id or its last part begins so, or of a function of this name; all without one."""
    if not name:
        return rows
    chosen = [
        row
        for row in rows
        if row["model"].startswith(name)
        or row["model"].rpartition("/")[2].startswith(name)
        or any(name in (of, of.rpartition("/")[2]) for of in _functions(row))
    ]
    if not chosen:
        raise UnknownModel(name)
    return chosen


def _functions(row: Row) -> list[str]:
    """The functions of a model, as a scheduler lists them or as a GPU manager does."""
    functions: list[str] = row["label"].split(", ") if "label" in row else row.get("functions", [])
    return functions


def node_table(rows: list[dict[str, Any]]) -> str:
    return table(_CELLS, rows)


def cluster_table(models: list[dict[str, Any]]) -> str:
    """A cluster's models, one line each, with the GPUs that hold them (`*`: pinned)."""
    return table(_CLUSTER_CELLS, models)


def cluster_detail(model: dict[str, Any]) -> str:
    parts = [columns([(head, cell(model)) for head, cell in _CLUSTER_CELLS.items()])]
    if model.get("configured"):
        parts.append(columns([_CONFIGURED_HEAD, *map(_configured_line, model["configured"])]))
    features = [(name, f"{value:.4g}") for name, value in model.get("features", {}).items()]
    if features:
        parts.append(columns([("USES OF A GPU", ""), *features]))
    return "\n\n".join(parts)


def _configured_line(run: dict[str, Any]) -> tuple[str, ...]:
    sizes = (str(run[part]) for part in ("batch", "vcpus", "vgpus"))
    return (*sizes, run["gpu_type"], f"{run['run_s']:.3g} s")


def _holders(model: Row) -> str:
    return ", ".join(f"{on['gpu']}{'*' if on['pinned'] else ''}" for on in model["holders"]) or "-"


def _sum(name: str, model: Row) -> int:
    return sum(holder[name] for holder in model["holders"])


def _times(by: dict[str, float]) -> str:
    """Measured seconds by tier or GPU type, as in `0.21 host, 1.4 disk`."""
    return ", ".join(f"{seconds:.3g} {key}" for key, seconds in by.items()) or "-"


def _merged(row: Row) -> str:
    """Concurrent calls that ran as one, as in `96 in 4`, and why most others did not."""
    counts = row.get("merged") or {}
    reasons = counts.get("singly") or {}
    merged = [f"{counts['calls']} in {counts['groups']}"] if counts.get("groups") else []
    return ", ".join([*merged, *sorted(reasons, key=reasons.__getitem__)[-1:]]) or "-"


def _ago(moment_s: float | None) -> str:
    if moment_s is None:
        return "-"
    seconds = max(0.0, time.time() - moment_s)
    if seconds < _MINUTE_S:
        return f"{seconds:.0f} s"
    return f"{seconds / _MINUTE_S:.0f} min" if seconds < _HOUR_S else f"{seconds / _HOUR_S:.1f} h"


# The columns of both tables: their heads, and their cells.
_CELLS: Mapping[str, Callable[[Row], str]] = {
    "MODEL": itemgetter("model"),
    "FUNCTIONS": itemgetter("label"),
    "WHERE": lambda row: row["gpu"] or row["tier"],
    "RUNTIME": hosting_text,
    "BYTES": lambda row: format_size(row["bytes"] or row["weights_bytes"]),
    "SINCE": lambda row: _ago(row["since"]),
    "USES": lambda row: str(row["uses"]),
    "MERGED": _merged,
    "LAST USED": lambda row: _ago(row["used"]) if row["uses"] else "-",
    "PINNED": lambda row: "yes" if row["pinned"] else "",
}
_CLUSTER_CELLS: Mapping[str, Callable[[Row], str]] = {
    "MODEL": itemgetter("model"),
    "FUNCTIONS": lambda model: functions_text(_functions(model)) or "-",
    "NEEDS": lambda model: format_size(model["memory_bytes"]),
    "HELD BY": _holders,
    "RUNTIME": lambda model: hostings_text(model["holders"]),
    "LEASES": lambda model: str(_sum("leases", model)),
    "WAITING": lambda model: str(model["waiting"] + _sum("waiting", model)),
    "LOAD": lambda model: _times(model["load_s"]),
    "RUN": lambda model: _times(model["run_s"]),
    "A MINUTE": lambda model: f"{60 * model['rate']:.1f}",
    "STAGES": lambda model: ", ".join(map(rest_text, model.get("rests", ()))) or "-",
}
