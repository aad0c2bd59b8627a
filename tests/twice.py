"""`python -m tests.twice ...`: pytest, and once more, alone, for the few tests that failed.

Tests that start processes and kill them depend on a machine that others use too. A test that fails
and then passes is named at the end: it is to be looked at, since not every such failure is the
machine's. More than a few failures are no accident, and are not tried again.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_FAILED = Path(".pytest_cache/v/cache/lastfailed")
_MOST = 5
_SOME_FAILED = 1  # pytest's exit code for it


def main(options: Sequence[str]) -> int:
    """Pytest's exit code, of the second time where there is one."""
    _FAILED.unlink(missing_ok=True)
    code = _pytest(options)
    failed = sorted(json.loads(_FAILED.read_text())) if _FAILED.exists() else []
    if code != _SOME_FAILED or not 0 < len(failed) <= _MOST:
        return code
    print("\n--- Once more, alone:", *failed, sep="\n    ", flush=True)
    code = _pytest(failed)
    if code == 0:
        print("--- Failed at first and passed alone; look at them:", *failed, sep="\n    ")
    return code


def _pytest(options: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *options], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
