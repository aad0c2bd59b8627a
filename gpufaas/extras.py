"""What an installation lacks of the packages of an extra, and the one command that brings them."""

import json
import re
import shlex
from importlib import metadata
from urllib.parse import unquote, urlsplit

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
    """The command that installs an extra, from where gpufaas itself came from."""
    return f"pip install {shlex.quote(f'{_source()}[{extra}]')}"


def needs(extra: str, package: str | None) -> str:
    """An error's text: all packages that are lacking, or the one that was found to be."""
    return f"needs {', '.join(lacking(extra)) or package}: {install_command(extra)}"


def _lacks(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return True
    return False


def _source() -> str:
    """The folder or file that gpufaas was installed from; its name where an index had it."""
    try:
        origin = metadata.distribution(_PROJECT).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        origin = None
    url = urlsplit(json.loads(origin)["url"] if origin else "")
    return unquote(url.path) if url.scheme == "file" else _PROJECT
