"""Where the secret of a cluster is: an option, a variable or the usual file."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from gpu_manager.credentials import load_secret
from gpufaas.local.stack_folder import state_folder


def add_secret_option(parser: argparse.ArgumentParser, missing: str = "") -> None:
    """The option for the file of the secret that all processes of a cluster share."""
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help=f"the cluster's secret{missing} (GPUFAAS_STATE/secret; /var/lib/gpufaas for root)",
    )


def cluster_secret(
    option: str | None, environment: Mapping[str, str], *, make: bool = False
) -> bytes:
    """The secret in the option's file, or in the default file; daemons `make` a missing one."""
    path = Path(option) if option else default_secret_file(environment)
    return load_secret(path, make=make)


def default_secret_file(environment: Mapping[str, str]) -> Path:
    """The file of the variable, or the file in this user's state folder."""
    named = environment.get("GPUFAAS_SCHEDULER_SECRET_FILE")
    return Path(named) if named else state_folder(environment) / "secret"
