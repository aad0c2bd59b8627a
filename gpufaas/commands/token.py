"""`gpufaas token`: the bearer token for a scheduler's API."""

import argparse

from gpufaas.options.shared import Commands, add_secret_option, cluster_secret
from scheduler.service.access import ApiRole, token


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("token", help="print the token for a scheduler's API")
    of_caller = "a token that may acquire and read, and change nothing"
    parser.add_argument("--caller", action="store_true", help=of_caller)
    add_secret_option(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    secret = cluster_secret(options.secret_file, options.environment)
    print(token(secret, ApiRole.CALLER if options.caller else ApiRole.ADMIN))
    return 0
