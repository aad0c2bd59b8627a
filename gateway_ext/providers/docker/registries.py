"""Who we are at registries: a `config.json` as `docker login` writes it."""

import base64
import binascii
import json
from pathlib import Path
from urllib.parse import urlsplit

from gateway_ext.errors import ProviderFailed


def credentials_for(image: str, config: Path, usual: str) -> str:
    """The header X-Registry-Auth for pulling an image; empty where nothing is known.

    `usual` is where the Engine has images from whose name says no registry, as that file calls it.
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
    """Read anew for every pull: such files change."""
    try:
        found = json.loads(config.read_bytes()).get("auths") or {}
        return dict(found)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ProviderFailed(f"the registries' credentials in {config}: {error}") from error


def _header(registry: str, entry: object, config: Path) -> str:
    if not isinstance(entry, dict):
        raise ProviderFailed(f"the credentials of {registry} in {config} make no sense")
    if entry.get("identitytoken"):
        said = {"identitytoken": entry["identitytoken"]}
    elif entry.get("auth"):
        said = _user_and_password(registry, str(entry["auth"]), config)
    else:
        raise ProviderFailed(
            f"{config} keeps the credentials of {registry} in a credential store, which this"
            " gateway cannot ask; write them as `auth`"
        )
    text = json.dumps({**said, "serveraddress": registry})
    return base64.urlsafe_b64encode(text.encode()).decode()


def _user_and_password(registry: str, auth: str, config: Path) -> dict[str, str]:
    try:
        user, colon, password = base64.b64decode(auth, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ProviderFailed(f"the credentials of {registry} in {config}: {error}") from error
    if not colon:
        raise ProviderFailed(f"the credentials of {registry} in {config} have no password")
    return {"username": user, "password": password.rstrip("\0")}
