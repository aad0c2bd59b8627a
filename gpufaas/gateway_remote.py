"""Asks a gateway as its administrator: the one that is named, or that of the stack that is up."""

import argparse
import http.client
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from gpufaas.errors import CommandError
from gpufaas.stack.folder import stack_folder

_DEFAULT_URL = "http://127.0.0.1:8080"
_TIMEOUT_S = 10.0
_UNAUTHORIZED = 401
_MOST_SHOWN = 500
_USER_FILE, _PASSWORD_FILE = "basic-auth-user", "basic-auth-password"


class GatewayRemote:
    """One gateway, and who asks it."""

    def __init__(self, url: str, authorization: str) -> None:
        self.url = url.rstrip("/")
        self._authorization = authorization

    def get(self, path: str) -> Any:
        """What is there; CommandError says why there is no answer."""
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(parts.netloc, timeout=_TIMEOUT_S)
        headers = {"Authorization": self._authorization} if self._authorization else {}
        try:
            connection.request("GET", parts.path + path, headers=headers)
            answer = connection.getresponse()
            return self._said(answer.status, answer.read())
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(f"no gateway answers at {self.url}: {error}") from error
        finally:
            connection.close()

    @contextmanager
    def reading(
        self, path: str, within_s: float, **headers: str
    ) -> Iterator[http.client.HTTPResponse]:
        """An answer while it goes on; CommandError as soon as nothing has come for so long."""
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(parts.netloc, timeout=within_s)
        if self._authorization:
            headers["Authorization"] = self._authorization
        try:
            connection.request("GET", parts.path + path, headers=headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                self._refused(answer.status, answer.read())
            yield answer
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(f"no gateway answers at {self.url}: {error}") from error
        finally:
            connection.close()

    def _refused(self, status: int, body: bytes) -> NoReturn:
        """Say why: as JSON tells it, or in plain text."""
        if status != _UNAUTHORIZED:
            text = body.decode("utf-8", "replace").strip()
            raise CommandError(f"{self.url} answers {status}: {text[:_MOST_SHOWN]}")
        self._said(status, body)
        raise AssertionError("it raises")

    def _said(self, status: int, body: bytes) -> Any:
        if status == _UNAUTHORIZED:
            raise CommandError(
                f"{self.url} wants a login: name the folder of {_USER_FILE} and {_PASSWORD_FILE} "
                "with --secrets-dir"
            )
        try:
            said = json.loads(body)
        except ValueError as error:
            raise CommandError(f"{self.url} answers {status}, and no JSON") from error
        if status != http.client.OK:
            message = said.get("message") if isinstance(said, dict) else ""
            raise CommandError(message or f"{self.url} answers {status}")
        return said


def add_gateway_options(parser: argparse.ArgumentParser) -> None:
    """Which gateway to ask, and how to be let in."""
    add = parser.add_argument
    add("--gateway", metavar="URL", help=f"(OPENFAAS_URL, or the stack's, or {_DEFAULT_URL})")
    add("--secrets-dir", metavar="DIR", help=f"with {_USER_FILE} and {_PASSWORD_FILE}")


def gateway_remote(options: argparse.Namespace) -> GatewayRemote:
    """The gateway that the options and the environment name."""
    environment: Mapping[str, str] = options.environment
    folder = stack_folder(None, environment)
    running = folder.running()
    named = options.gateway or environment.get("OPENFAAS_URL")
    url = named or (_DEFAULT_URL if running is None else running.gateway)
    if urlsplit(url).scheme not in {"http", "https"}:
        raise CommandError(f"{url!r} is no http:// or https:// URL")
    secrets = options.secrets_dir or environment.get("secret_mount_path")
    return GatewayRemote(url, _authorization(Path(secrets) if secrets else folder.credentials))


def _authorization(folder: Path) -> str:
    """Who we are; nobody, where nobody says so: the gateway may let everybody in."""
    try:
        user, password = (
            (folder / name).read_text(encoding="utf-8").strip()
            for name in (_USER_FILE, _PASSWORD_FILE)
        )
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise CommandError(f"{folder}: {error}") from error
    return "Basic " + b64encode(f"{user}:{password}".encode()).decode()
