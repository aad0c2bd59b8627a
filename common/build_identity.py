"""Which build of gpufaas this is: its release, and the commit that it was made of."""

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_FILE = Path(__file__).with_name("commit.txt")  # made with a wheel (deploy/wheel_build.py)
_CHECKOUT = Path(__file__).parents[1] / ".git"
_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_MOST_BYTES = 1 << 20


def release() -> str:
    """The version of the installed package; 0 if it was not installed."""
    try:
        return version("gpufaas")
    except PackageNotFoundError:  # run from a folder that was not installed
        return "0"


def commit(file: Path = _FILE, checkout: Path = _CHECKOUT) -> str:
    """The commit in the file of a wheel, else that of the checkout; empty if neither is known."""
    name = _text(file) or _commit_of(checkout)
    return name if _COMMIT.fullmatch(name) else ""


def _commit_of(git: Path) -> str:
    """What HEAD means, without the git program; `.git` is a file in a further work tree."""
    pointer = _text(git)
    folder = git.parent / pointer.removeprefix("gitdir: ") if pointer else git
    head = _text(folder / "HEAD")
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    shared = folder / (_text(folder / "commondir") or ".")
    return _text(folder / name) or _text(shared / name) or _packed(shared, name)


def _packed(folder: Path, name: str) -> str:
    pairs = (line.partition(" ") for line in _text(folder / "packed-refs").splitlines())
    return next((commit for commit, _, reference in pairs if reference == name), "")


def _text(path: Path) -> str:
    """Empty for what is no file, or cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return ""
