"""`gpufaas policy list|get|set`: the policy of a running scheduler."""

import argparse
from typing import Any

from common import numerals
from gpufaas.errors import CommandError
from gpufaas.options.shared import Commands, add_verb, print_answer
from gpufaas.output.cells import columns
from gpufaas.output.cluster_text import choice_text
from gpufaas.remote.scheduler_api import add_scheduler_options, scheduler_api

Policy = dict[str, Any]


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("policy", help="show, change or list a scheduler's policies")
    add_scheduler_options(parser)
    parser.set_defaults(run=_list, long=False)
    verbs = parser.add_subparsers(dest="verb")
    get = add_verb(verbs, "get", "the policy in force; of a named one the rule and the parameters")
    get.add_argument("policy", nargs="?", default=None)
    choose = add_verb(verbs, "set", "change the policy, losing no request")
    choose.add_argument("policy")
    choose.add_argument(
        "parameters", nargs="*", default=[], metavar="NAME=NUMBER", help="as in o3_limit=10"
    )
    every = add_verb(verbs, "list", "every policy with its parameters; * is in force")
    every.add_argument("--long", action="store_true", default=False, help="with their rules")
    for verb, run in ((get, _get), (choose, _set), (every, _list)):
        add_scheduler_options(verb)
        verb.set_defaults(run=run)


def _get(options: argparse.Namespace) -> int:
    scheduler = scheduler_api(options)
    if options.policy is None:
        return print_answer(scheduler.get("/policy"), options, choice_text, indent=None)
    for policy in scheduler.get("/policies"):
        if policy["name"] == options.policy:
            return print_answer(policy, options, _rule_text)
    raise CommandError(f"there is no policy {options.policy!r}: `gpufaas policy list` has all")


def _set(options: argparse.Namespace) -> int:
    parameters = dict(_parameter(text) for text in options.parameters)
    choice = {"policy": options.policy, "parameters": parameters}
    answer = scheduler_api(options).put("/policy", choice)
    return print_answer(answer, options, choice_text, indent=None)


def _list(options: argparse.Namespace) -> int:
    scheduler = scheduler_api(options)

    def text(answer: list[Policy]) -> str:
        if options.long:
            return "\n\n".join(map(_rule_text, answer))
        in_force = scheduler.get("/policy")["policy"]
        rows = [_row(policy, "*" if policy["name"] == in_force else "") for policy in answer]
        return columns([("", "POLICY", "RULE", "PARAMETERS"), *rows])

    return print_answer(scheduler.get("/policies"), options, text)


def _row(policy: Policy, mark: str) -> tuple[str, ...]:
    _, _, parameters = _defaults(policy).partition(" ")
    return mark, policy["name"], _summary(policy), parameters


def _rule_text(policy: Policy) -> str:
    """The policy with its defaults, what it does in a line, and its whole rule."""
    lines = [_summary(policy), "", *policy["rule"].splitlines()]
    return "\n".join([_defaults(policy), *(f"  {line}".rstrip() for line in lines)])


def _summary(policy: Policy) -> str:
    """The summary without the policy's name, which it begins with."""
    return policy["summary"].partition(": ")[2] or str(policy["summary"])


def _defaults(policy: Policy) -> str:
    return choice_text({"policy": policy["name"], "parameters": policy["parameters"]})


def _parameter(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name, numerals.number(number)
    except ValueError as error:
        raise CommandError(f"parameter {text!r}: NAME=NUMBER is expected") from error
