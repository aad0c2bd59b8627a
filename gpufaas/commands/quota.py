"""`gpufaas quota list|show|set|remove`: shares, priorities, quotas of namespaces and functions."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common import numerals
from common.errors import BadSize
from common.numerals import format_size, parse_size
from gpufaas.errors import CommandError
from gpufaas.options.shared import Commands, add_verb
from gpufaas.output.cells import columns
from gpufaas.remote.scheduler_api import (
    SchedulerApi,
    add_scheduler_options,
    in_path,
    scheduler_api,
)
from scheduler.model.errors import BadValue
from scheduler.model.owner_terms import check_number

_NONE = "none"
_OWNER_HELP = "NAMESPACE or NAMESPACE/FUNCTION"
# The options of `set`, with the names of their terms.
_TERMS = {
    "weight": "weight",
    "priority": "priority",
    "gpu_seconds": "gpu_s",
    "window": "window_s",
    "memory": "resident_bytes",
    "leases": "leases",
    "waiting": "waiting",
}


def add_parser(commands: Commands) -> None:
    help_text = "shares, priorities and quotas of namespaces and functions"
    parser = commands.add_parser("quota", help=help_text)
    add_scheduler_options(parser)
    parser.set_defaults(run=_show, owner=None)
    verbs = parser.add_subparsers(dest="verb")
    choose = add_verb(verbs, "set", "set some of an owner's terms; the others stay")
    _add_owner(choose)
    add = choose.add_argument
    add("--weight", type=_number, help="its part of the GPUs where others wait too (1)")
    add("--priority", type=_whole, help="how urgent its requests are (0)")
    add("--gpu-seconds", type=_number_or_none, metavar="N", help="GPU time in any window")
    add("--window", type=_number, metavar="SECONDS", help="the window of the GPU time (60)")
    add("--memory", type=_size_or_none, metavar="SIZE", help="GPU memory of its models: 2GiB")
    add("--leases", type=_whole_or_none, metavar="N", help="GPU leases at a time")
    add("--waiting", type=_whole_or_none, metavar="N", help="requests that wait at a time")
    choose.description = "A limit ends with the value `none`."
    show = add_verb(verbs, "show", "terms, and what is used of them; of all by default",
                    "list", "get")  # fmt: skip
    show.add_argument("owner", nargs="?", default=None, help=_OWNER_HELP)
    remove = add_verb(verbs, "remove", "remove what an operator set of an owner")
    _add_owner(remove)
    for verb, run in ((choose, _set), (show, _show), (remove, _remove)):
        add_scheduler_options(verb)
        verb.set_defaults(run=run)


def _add_owner(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("owner", help=_OWNER_HELP)


def _set(options: argparse.Namespace) -> int:
    given = vars(options)
    changed = {term: given[option] for option, term in _TERMS.items() if option in given}
    if not changed:
        raise CommandError("nothing to set: name one of " + ", ".join(map(_flag, _TERMS)))
    for option, term in _TERMS.items():
        if changed.get(term) is not None:
            _check(option, term, changed[term])
    scheduler, path = scheduler_api(options), _path(options.owner)
    before: Mapping[str, Any] = scheduler.get(path)["terms"]
    if note := _namespace_of_none(options.owner, _known_functions(scheduler)):
        print(f"gpufaas quota: {note}", file=sys.stderr)
    return _print([scheduler.put(path, {**before, **changed})], options)


def _check(option: str, term: str, value: float) -> None:
    try:
        check_number(term, value)
    except BadValue as error:
        raise CommandError(f"{_flag(option)}: {error.detail}, not {value:g}") from error


def _known_functions(scheduler: SchedulerApi) -> list[str]:
    """Those of the models; none if the models cannot be read: only a note needs them."""
    try:
        models = scheduler.get("/models")
    except CommandError:
        return []
    return [of for model in models for of in model.get("functions", ())]


def _namespace_of_none(owner: str, functions: Sequence[str]) -> str:
    """What to say of a namespace that only looks like a function; empty if it is none of these."""
    named = sorted({of for of in functions if of.rpartition("/")[2] == owner})
    if not named or any(of.startswith(f"{owner}/") for of in functions):
        return ""
    return f"{owner!r} is a namespace of no function; the function is {' or '.join(named)}"


def _show(options: argparse.Namespace) -> int:
    scheduler = scheduler_api(options)
    if options.owner is None:
        return _print(scheduler.get("/quotas")["owners"], options)
    return _print([scheduler.get(_path(options.owner))], options)


def _remove(options: argparse.Namespace) -> int:
    return _print([scheduler_api(options).delete(_path(options.owner))], options)


def _print(rows: list[dict[str, Any]], options: argparse.Namespace) -> int:
    print(json.dumps(rows, indent=1) if options.json else quota_table(rows))
    return 0


def _path(owner: str) -> str:
    return f"/quotas/{in_path(owner)}"


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


# -- values ---------------------------------------------------------------------------------------


def _number(text: str) -> float:
    try:
        return numerals.number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: a number is expected") from error


def _whole(text: str) -> int:
    try:
        return numerals.whole(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number is expected") from error


def _or_none(text: str, read: Callable[[str], float]) -> float | None:
    return None if text == _NONE else read(text)


def _number_or_none(text: str) -> float | None:
    return _or_none(text, _number)


def _whole_or_none(text: str) -> float | None:
    return _or_none(text, _whole)


def _size_or_none(text: str) -> float | None:
    try:
        return _or_none(text, parse_size)
    except BadSize as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# -- the table ------------------------------------------------------------------------------------


_HEAD = (
    "OWNER",
    "SET BY",
    "WEIGHT",
    "PRIORITY",
    "GPU TIME",
    "GPU MEMORY",
    "LEASES",
    "WAITING",
    "HELD BACK",
    "REFUSED",
)


def quota_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line an owner, each use beside its limit: `3 of 4`."""
    return columns([_HEAD, *map(_line, rows)])


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    terms, use = row["terms"], row["use"]
    return (
        row["owner"],
        row["set_by"] or "-",
        f"{terms['weight']:g}",
        str(terms["priority"]),
        _gpu_time(terms, use),
        _of(use["resident_bytes"], terms["resident_bytes"], format_size),
        _of(use["leases"], terms["leases"], str),
        _of(use["waiting"], terms["waiting"], str),
        str(use["held_back"]),
        str(sum(use["refused"].values())),
    )


def _gpu_time(terms: Mapping[str, Any], use: Mapping[str, Any]) -> str:
    """Seconds in the window, which is named where it limits something."""
    used = _of(use["gpu_s"], terms["gpu_s"], _seconds)
    return used if terms["gpu_s"] is None else f"{used} in {terms['window_s']:g} s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.4g} s"


def _of(used: Any, limit: Any, text: Callable[[Any], str]) -> str:
    return text(used) if limit is None else f"{text(used)} of {text(limit)}"
