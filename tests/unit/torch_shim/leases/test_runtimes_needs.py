"""What a function's runtime imports of the shim needs the standard library alone."""

import subprocess
import sys

from tests.kit.places import ROOT

# Isolated, and without site-packages: as in an image that has a bare Python.
_IMPORTS = "import sys; sys.path.insert(0, {root!r}); import torch_shim.leases.request_context"


def test_request_context_is_imported_where_nothing_is_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _IMPORTS.format(root=str(ROOT))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
