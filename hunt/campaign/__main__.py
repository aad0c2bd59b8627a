"""Starts `campaign.py` with mounts that nobody else sees, and that end with it."""

import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Become the command, with the same arguments, in a mount name space of its own."""
    command = [sys.executable, "-m", "hunt.campaign.campaign", *sys.argv[1:]]
    os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", *command])


if __name__ == "__main__":
    main()
