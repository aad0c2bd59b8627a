"""What a test needs beside Python: found, or the test is skipped with its reason.

On a CI machine, where `tests/tools.sh` installs everything, a thing that lacks is a failure.
"""

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

_SYSTEM = "/usr/sbin:/sbin"


def command(name: str, package: str) -> Path:
    """The path of a program that Debian has in this package."""
    found = shutil.which(name) or shutil.which(name, path=_SYSTEM)
    if found is None:
        lacking(f"needs {name}: apt-get install {package}")
    return Path(found)


def root() -> None:
    """Go on as root alone."""
    if os.geteuid() != 0:
        lacking("needs root")


def lacking(reason: str) -> NoReturn:
    """Skip the test, or fail it where everything should be there."""
    if os.environ.get("CI"):
        pytest.fail(f"a CI machine has to have this: {reason}")
    pytest.skip(reason)
