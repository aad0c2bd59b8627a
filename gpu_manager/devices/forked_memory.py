"""What a forked process takes of the machine's memory beyond what its parent has."""

from pathlib import Path

_KIB = 1024


def forked_bytes(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Return the anonymous memory of a fork less that of its parent, which has the same pages.

    None if one of them is gone, or if the parent is not the process that it was forked from.
    """
    try:
        own = _status(proc / str(pid))
        parent = own["PPid"]
        if _command(proc / str(pid)) != _command(proc / parent):
            return None
        beyond = _kib(own["RssAnon"]) - _kib(_status(proc / parent)["RssAnon"])
    except (OSError, KeyError, ValueError):  # gone, or ending: it has no memory any more
        return None
    return max(0, beyond) * _KIB


def _status(process: Path) -> dict[str, str]:
    lines = (process / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    found = (line.partition(":") for line in lines)
    return {name: value.strip() for name, _, value in found}


def _command(process: Path) -> bytes:
    return (process / "cmdline").read_bytes()


def _kib(text: str) -> int:
    return int(text.split(maxsplit=1)[0])
