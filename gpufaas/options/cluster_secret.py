"""Where the secret of a cluster is: an option, a variable or the usual file."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from gpu_manager.credentials import load_secret
from gpufaas.local.stack_folder import state_folder


def add_secret_option(parser: argparse.ArgumentParser) -> None:
    """The option for the file of the secret that all processes of a cluster share."""
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help="the cluster's secret; made if missing (/var/lib/gpufaas/secret for root)",
    )


def cluster_secret(option: str | None, environment: Mapping[str, str]) -> bytes:
    """The secret in the option's file, or in the default file; a missing file is made."""
    return load_secret(Path(option) if option else default_secret_file(environment))


def default_secret_file(environment: Mapping[str, str]) -> Path:
    """The file of the variable, or the file in this user's state folder."""
    named = environment.get("GPUFAAS_SCHEDULER_SECRET_FILE")
    return Path(named) if named else state_folder(environment) / "secret"
