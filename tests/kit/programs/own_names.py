"""Folders of a user's project that are named as folders of ours, and a program that needs them."""

from pathlib import Path

# Of the checkout, and of a wheel. The first half are packages, the others plain folders.
_PACKAGES = ("cache_manager", "common", "gpu_manager", "scheduler")
_FOLDERS = ("bench", "compat", "deploy", "hunt", "research", "tests")

IMPORTS = "".join(
    f"from {name}.owner import WHOSE as of_{name}\nassert of_{name} == 'the user'\n"
    for name in (*_PACKAGES, *_FOLDERS)
)


def write_own_names(project: Path) -> None:
    """Make all of them in the user's folder."""
    for name in (*_PACKAGES, *_FOLDERS):
        folder = project / name
        folder.mkdir()
        (folder / "owner.py").write_text("WHOSE = 'the user'\n")
        if name in _PACKAGES:
            (folder / "__init__.py").write_text("")
