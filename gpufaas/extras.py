"""What an installation lacks of the packages of an extra, and the one command that brings them."""

import json
import re
import shlex
import sys
from importlib import metadata
from importlib.util import find_spec
from typing import Any
from urllib.parse import unquote, urlsplit

from gpufaas.errors import CommandError

_PROJECT = "gpufaas"
_REQUIRED = re.compile(r"""([\w.-]+)[^;]*;.*\bextra == ['"]([\w-]+)['"]""")


def lacking(extra: str) -> list[str]:
    """The packages of an extra that are not installed; none where nothing says what it has."""
    try:
        required = metadata.requires(_PROJECT) or ()
    except metadata.PackageNotFoundError:  # a checkout that nobody has installed
        return []
    found = filter(None, map(_REQUIRED.match, required))
    return [
        name for name, of in (match.groups() for match in found) if of == extra and _lacks(name)
    ]


def install_command(extra: str) -> str:
    """The command that installs an extra here, from where gpufaas itself came from."""
    return shlex.join([sys.executable, "-m", "pip", "install", *_source(extra)])


def needs(extra: str, package: str | None) -> str:
    """An error's text: all packages that are lacking, or the one that was found to be."""
    return f"needs {', '.join(lacking(extra)) or package}: {install_command(extra)}"


def has_torch() -> bool:
    """Whether a GPU manager can run here. Without one, functions do that need no GPU."""
    return find_spec("torch") is not None


def require_torch() -> None:
    """CommandError names all that is lacking where there is no torch."""
    if not has_torch():
        raise CommandError(needs("gpu", "torch"))


def _lacks(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return True
    return False


def _source(extra: str) -> list[str]:
    """What pip takes: the folder, file or URL that gpufaas came from, or the name of an index."""
    try:
        text = metadata.distribution(_PROJECT).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    origin: dict[str, Any] = json.loads(text) if text else {"url": ""}
    url = urlsplit(origin["url"])
    if url.scheme == "file":
        editable = ["--editable"] if origin.get("dir_info", {}).get("editable") else []
        return [*editable, f"{unquote(url.path)}[{extra}]"]
    system = origin.get("vcs_info")
    where = f"{system['vcs']}+{origin['url']}@{system['commit_id']}" if system else origin["url"]
    return [f"{_PROJECT}[{extra}] @ {where}" if where else f"{_PROJECT}[{extra}]"]
