"""`gpufaas policy get|set|list`: the policy of a running scheduler."""

import argparse
import json
from typing import Any

from common import numerals
from gpufaas.errors import CommandError
from gpufaas.options.subparsers import Commands, add_verb
from gpufaas.output.cluster_text import choice_text
from gpufaas.remote.scheduler_api import add_scheduler_options, scheduler_api


def add_parser(commands: Commands) -> None:
    """Describe the command's options."""
    parser = commands.add_parser("policy", help="show, change or list a scheduler's policies")
    add_scheduler_options(parser)
    verbs = parser.add_subparsers(dest="verb", required=True)
    get = add_verb(verbs, "get", "the policy in force")
    choose = add_verb(verbs, "set", "change the policy, losing no request")
    choose.add_argument("policy")
    choose.add_argument(
        "parameters", nargs="*", default=[], metavar="NAME=NUMBER", help="as in o3_limit=10"
    )
    every = add_verb(verbs, "list", "every policy with its parameters")
    for each, run in ((get, _get), (choose, _set), (every, _list)):
        add_scheduler_options(each)
        each.set_defaults(run=run)


def _get(options: argparse.Namespace) -> int:
    return _print_choice(scheduler_api(options).get("/policy"), options)


def _set(options: argparse.Namespace) -> int:
    parameters = dict(_parameter(text) for text in options.parameters)
    choice = {"policy": options.policy, "parameters": parameters}
    return _print_choice(scheduler_api(options).put("/policy", choice), options)


def _list(options: argparse.Namespace) -> int:
    found = scheduler_api(options).get("/policies")
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    for policy in found:
        print(policy["summary"].partition(": ")[2] or policy["summary"], end="\n  ")
        print(
            choice_text({"policy": policy["name"], "parameters": policy["parameters"]}), end="\n\n"
        )
        print("\n".join(f"  {line}".rstrip() for line in policy["rule"].splitlines()), end="\n\n")
    return 0


def _print_choice(choice: dict[str, Any], options: argparse.Namespace) -> int:
    print(json.dumps(choice) if options.json else choice_text(choice))
    return 0


def _parameter(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name, numerals.number(number)
    except ValueError as error:
        raise CommandError(f"parameter {text!r}: NAME=NUMBER is expected") from error
