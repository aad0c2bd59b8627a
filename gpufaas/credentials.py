"""`gpufaas token`: what to show to a scheduler; and where the cluster's secret is."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from gpu_manager.credentials import load_secret
from gpufaas.arguments import Commands
from scheduler.service.access import Role, token


def add_parser(commands: Commands) -> None:
    """Describe the command's options."""
    parser = commands.add_parser("token", help="print the token that a scheduler's API wants")
    parser.add_argument(
        "--caller", action="store_true", help="one that may acquire and look, and change nothing"
    )
    add_secret_option(parser)
    parser.set_defaults(run=_run)


def add_secret_option(parser: argparse.ArgumentParser) -> None:
    """Where the secret is that all parts of one cluster share."""
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help="the cluster's secret; made if missing (/var/lib/gpufaas/secret for root)",
    )


def cluster_secret(named: str | None, environment: Mapping[str, str]) -> bytes:
    """The cluster's secret, from the file that was named or from where it is by default."""
    return load_secret(Path(named) if named else default_secret_file(environment))


def default_secret_file(environment: Mapping[str, str]) -> Path:
    """Where this user's schedulers and commands look for the secret."""
    named = environment.get("GPUFAAS_SCHEDULER_SECRET_FILE")
    return Path(named) if named else state_folder(environment) / "secret"


def state_folder(environment: Mapping[str, str]) -> Path:
    """Where this user's parts keep what outlives them."""
    named = environment.get("GPUFAAS_STATE")
    if named:
        return Path(named).absolute()
    if os.geteuid() == 0:
        return Path("/var/lib/gpufaas")
    state = environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "gpufaas"


def _run(options: argparse.Namespace) -> int:
    secret = cluster_secret(options.secret_file, options.environment)
    print(token(secret, Role.CALLER if options.caller else Role.ADMIN))
    return 0
