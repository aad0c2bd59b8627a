"""`gpufaas quota list|show|set|remove`: shares, priorities, quotas of namespaces and functions."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common import numerals
from common.errors import BadSize
from common.numerals import format_size, parse_size
from gpufaas.errors import CommandError
from gpufaas.options.shared import Commands, add_verb, print_answer
from gpufaas.output.cells import Row, table
from gpufaas.remote.scheduler_api import SchedulerApi, add_scheduler_options, in_path, scheduler_api
from scheduler.model.errors import BadValue
from scheduler.model.owner_terms import check_number

_NONE = "none"
_OWNER_HELP = "NAMESPACE or NAMESPACE/FUNCTION"


def add_parser(commands: Commands) -> None:
    help_text = "shares, priorities and quotas of namespaces and functions"
    parser = commands.add_parser("quota", help=help_text)
    add_scheduler_options(parser)
    parser.set_defaults(run=_list)
    verbs = parser.add_subparsers(dest="verb")
    choose = add_verb(verbs, "set", "set some of an owner's terms; the others stay")
    _add_owner(choose)
    for option, (_, read, metavar, text) in _TERMS.items():
        choose.add_argument(_flag(option), type=read, metavar=metavar, help=text)
    choose.description = "A limit ends with the value `none`."
    every = add_verb(verbs, "list", "all owners' terms, and what is used of them")
    get = add_verb(verbs, "get", "an owner's terms, and what is used of them")
    _add_owner(get)
    remove = add_verb(verbs, "remove", "remove what an operator set of an owner")
    _add_owner(remove)
    for verb, run in ((choose, _set), (every, _list), (get, _get), (remove, _remove)):
        add_scheduler_options(verb)
        verb.set_defaults(run=run)


def _add_owner(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("owner", help=_OWNER_HELP)


def _set(options: argparse.Namespace) -> int:
    given = vars(options)
    changed = {term: given[option] for option, (term, *_) in _TERMS.items() if option in given}
    if not changed:
        raise CommandError("nothing to set: name one of " + ", ".join(map(_flag, _TERMS)))
    for option, (term, *_) in _TERMS.items():
        if changed.get(term) is not None:
            _check(option, term, changed[term])
    scheduler, path = scheduler_api(options), _path(options.owner)
    before: Mapping[str, Any] = scheduler.get(path)["terms"]
    if note := _namespace_of_none(options.owner, _known_functions(scheduler)):
        print(f"gpufaas quota: {note}", file=sys.stderr)
    return print_answer([scheduler.put(path, {**before, **changed})], options, quota_table)


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


def _list(options: argparse.Namespace) -> int:
    return print_answer(scheduler_api(options).get("/quotas")["owners"], options, quota_table)


def _get(options: argparse.Namespace) -> int:
    return print_answer([scheduler_api(options).get(_path(options.owner))], options, quota_table)


def _remove(options: argparse.Namespace) -> int:
    removed = scheduler_api(options).delete(_path(options.owner))
    return print_answer([removed], options, quota_table)


def _path(owner: str) -> str:
    return f"/quotas/{in_path(owner)}"


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


# -- values ---------------------------------------------------------------------------------------


def _value(read: Callable[[str], float], what: str) -> Callable[[str], float]:
    def value(text: str) -> float:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {what} is expected") from error
        except BadSize as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return value


def _or_none(read: Callable[[str], float]) -> Callable[[str], float | None]:
    return lambda text: None if text == _NONE else read(text)


_number, _whole = _value(numerals.number, "a number"), _value(numerals.whole, "a whole number")
_size = _value(parse_size, "a size")


# The options of `set`: their terms, values, metavars and helps.
_TERMS: Mapping[str, tuple[str, Callable[[str], float | None], str | None, str]] = {
    "weight": ("weight", _number, None, "its part of the GPUs where others wait too (1)"),
    "priority": ("priority", _whole, None, "how urgent its requests are (0)"),
    "gpu_seconds": ("gpu_s", _or_none(_number), "N", "GPU time in any window"),
    "window": ("window_s", _number, "SECONDS", "the window of the GPU time (60)"),
    "memory": ("resident_bytes", _or_none(_size), "SIZE", "GPU memory of its models: 2GiB"),
    "leases": ("leases", _or_none(_whole), "N", "GPU leases at a time"),
    "waiting": ("waiting", _or_none(_whole), "N", "requests that wait at a time"),
}


# -- the table ------------------------------------------------------------------------------------


def quota_table(rows: Sequence[Row]) -> str:
    """One line an owner, each use beside its limit: `3 of 4`."""
    return table(_CELLS, rows)


def _gpu_time(row: Row) -> str:
    """Seconds in the window, which is named where it limits something."""
    used = _used("gpu_s", row, lambda seconds: f"{seconds:.4g} s")
    terms = row["terms"]
    return used if terms["gpu_s"] is None else f"{used} in {terms['window_s']:g} s"


def _used(name: str, row: Row, text: Callable[[Any], str] = str) -> str:
    used, limit = row["use"][name], row["terms"][name]
    return text(used) if limit is None else f"{text(used)} of {text(limit)}"


_CELLS: Mapping[str, Callable[[Row], str]] = {
    "OWNER": lambda row: row["owner"],
    "SET BY": lambda row: row["set_by"] or "-",
    "WEIGHT": lambda row: f"{row['terms']['weight']:g}",
    "PRIORITY": lambda row: str(row["terms"]["priority"]),
    "GPU TIME": _gpu_time,
    "GPU MEMORY": lambda row: _used("resident_bytes", row, format_size),
    "LEASES": lambda row: _used("leases", row),
    "WAITING": lambda row: _used("waiting", row),
    "HELD BACK": lambda row: str(row["use"]["held_back"]),
    "REFUSED": lambda row: str(sum(row["use"]["refused"].values())),
}
