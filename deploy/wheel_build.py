"""Puts the commit that a wheel is made of into it, where build_identity.py reads it; for hatchling.

The commit is that of the checkout; where there is none, as in the build of an image, it is given
in the environment as GPUFAAS_COMMIT. A wheel of neither has no such file.
"""

import os
import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_IN_WHEEL = "gpufaas/parts/common/commit.txt"


class CommitFile(BuildHookInterface):  # type: ignore[type-arg]  # any builder's configuration
    """Adds the file; an installation in place shows the commit of its checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the wheel or the source archive is written."""
        commit = os.environ.get("GPUFAAS_COMMIT") or self._of_checkout()  # noqa: TID251 (a program)
        if version == "editable" or not commit:
            return
        with tempfile.NamedTemporaryFile("w", prefix="commit", delete=False) as file:
            file.write(f"{commit}\n")
        build_data["force_include"][file.name] = _IN_WHEEL

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called when it is written."""
        del version, artifact_path
        for source, target in build_data["force_include"].items():
            if target == _IN_WHEEL:
                Path(source).unlink(missing_ok=True)

    def _of_checkout(self) -> str:
        program = runpy.run_path(str(Path(self.root, "common", "build_identity.py")))
        return str(program["commit"](Path(os.devnull), Path(self.root, ".git")))
