"""The entry point of the `gpufaas` command.

Only the name `gpufaas` can be imported where gpufaas is installed: a user's own `common` or
`scheduler` is the one that the user's programs get. Our programs begin here, and look for ours
first, whatever is in the current folder or beside gpufaas in the environment.
"""

import importlib
import sys
from pathlib import Path

import gpufaas


def our_packages() -> Path:
    """The folder of all our packages: in a wheel inside this one, in a checkout around it."""
    here = Path(__file__).resolve().parent
    inside = here / "parts"
    return inside if inside.is_dir() else here.parent


def main() -> int:
    """Run one command; its exit code."""
    gpufaas.__path__[:] = [str(Path(__file__).resolve().parent)]  # not by way of a link
    sys.path.insert(0, str(our_packages()))
    code: int = importlib.import_module("gpufaas.cli").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
