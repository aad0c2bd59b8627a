"""Credentials for registries, from a `config.json` as `docker login` writes it."""

import base64
import json
from pathlib import Path
from urllib.parse import urlsplit

from gateway_ext.errors import ProviderFailed


def credentials_for(image: str, config: Path, usual: str) -> str:
    """The header X-Registry-Auth for pulling an image; empty if there are no credentials for it.

    `usual` is the registry of images whose name has no registry, as the file calls it.
    """
    registry = _registry_of(image, usual)
    known = _known(config)
    for name in (registry, f"https://{registry}", f"https://{registry}/v1/"):
        if name in known:
            return _header(name, known[name], config)
    return ""


def _registry_of(image: str, usual: str) -> str:
    first, slash, _ = image.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost"):
        return usual
    host = urlsplit(usual).hostname or ""
    return usual if first in {host, host.removeprefix("index.")} else first


def _known(config: Path) -> dict[str, object]:
    """Read for every pull, as `docker login` may have changed the file."""
    try:
        found = json.loads(config.read_bytes()).get("auths") or {}
        return dict(found)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ProviderFailed(f"the registries' credentials in {config}: {error}") from error


def _header(registry: str, entry: object, config: Path) -> str:
    if not isinstance(entry, dict):
        raise ProviderFailed(f"the credentials of {registry} in {config} are not an object")
    if entry.get("identitytoken"):
        auth = {"identitytoken": entry["identitytoken"]}
    elif entry.get("auth"):
        auth = _user_and_password(registry, str(entry["auth"]), config)
    else:
        raise ProviderFailed(
            f"{config} keeps the credentials of {registry} in a credential store, which this"
            " gateway cannot ask; write them as `auth`"
        )
    text = json.dumps({**auth, "serveraddress": registry})
    return base64.urlsafe_b64encode(text.encode()).decode()


def _user_and_password(registry: str, auth: str, config: Path) -> dict[str, str]:
    try:
        user, colon, password = base64.b64decode(auth, validate=True).decode().partition(":")
    except ValueError as error:  # no base64, or no UTF-8 in it
        raise ProviderFailed(f"the credentials of {registry} in {config}: {error}") from error
    if not colon:
        raise ProviderFailed(f"the credentials of {registry} in {config} have no password")
    return {"username": user, "password": password.rstrip("\0")}
