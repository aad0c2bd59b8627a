"""Requests to a gateway with its user and password: the named gateway, or this user's stack's."""

import argparse
import http.client
import json
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from gpufaas.errors import CommandError
from gpufaas.local.stack_folder import stack_folder
from gpufaas.options.http_url import HttpUrl, http_url
from gpufaas.remote.http_request import TIMEOUT_S, open_response

_DEFAULT_URL = "http://127.0.0.1:8080"
_MOST_SHOWN = 500
_USER_FILE, _PASSWORD_FILE = "basic-auth-user", "basic-auth-password"


class GatewayApi:
    """One gateway, with the authorization that requests to it carry."""

    def __init__(self, url: HttpUrl, authorization: str) -> None:
        self.url = url
        self._authorization = authorization

    def get(self, path: str) -> Any:
        """The answer to a GET; CommandError says why there is none."""
        with self._response(path, {}, TIMEOUT_S) as response:
            status, body = response.status, response.read()
        return self._content(status, body)

    @contextmanager
    def stream(
        self, path: str, longest_silence_s: float, **headers: str
    ) -> Iterator[http.client.HTTPResponse]:
        """A response while it arrives; CommandError once the gateway is silent for that long."""
        with self._response(path, headers, longest_silence_s) as response:
            if response.status != http.client.OK:
                self._refuse(response.status, response.read())
            yield response

    @contextmanager
    def _response(
        self, path: str, headers: Mapping[str, str], timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        if self._authorization:
            headers = {**headers, "Authorization": self._authorization}
        with open_response(
            self.url, "gateway", "GET", path, headers=headers, timeout_s=timeout_s
        ) as response:
            yield response

    def _refuse(self, status: int, body: bytes) -> NoReturn:
        """Raise the reason, which is JSON or plain text."""
        if status != http.client.UNAUTHORIZED:
            text = body.decode("utf-8", "replace").strip()
            raise CommandError(f"{self.url} answers {status}: {text[:_MOST_SHOWN]}")
        self._content(status, body)
        raise AssertionError("an unauthorized answer is an error")

    def _content(self, status: int, body: bytes) -> Any:
        if status == http.client.UNAUTHORIZED:
            raise CommandError(
                f"{self.url} needs a login: name the folder of {_USER_FILE} and {_PASSWORD_FILE} "
                "with --secrets-dir"
            )
        try:
            content = json.loads(body)
        except ValueError as error:
            raise CommandError(f"{self.url} answers {status}, and no JSON") from error
        if status != http.client.OK:
            message = content.get("message") if isinstance(content, dict) else ""
            raise CommandError(message or f"{self.url} answers {status}")
        return content


def add_gateway_options(parser: argparse.ArgumentParser) -> None:
    """Options for the gateway's URL and for the folder of its user and password."""
    add_gateway_url_option(parser)
    secrets_help = f"with {_USER_FILE} and {_PASSWORD_FILE}"
    parser.add_argument("--secrets-dir", metavar="DIR", help=secrets_help)


def add_gateway_url_option(parser: argparse.ArgumentParser) -> None:
    """The option for the gateway's URL, for commands that need no login."""
    help_text = f"(OPENFAAS_URL, or the stack's, or {_DEFAULT_URL})"
    parser.add_argument("--gateway", metavar="URL", help=help_text)


def gateway_api(options: argparse.Namespace) -> GatewayApi:
    """The gateway that the options and the environment name.

    A login in the URL is used before that of the folder of secrets.
    """
    environment: Mapping[str, str] = options.environment
    url = http_url(gateway_url(options.gateway, environment), "gateway")
    secrets = options.secrets_dir or environment.get("secret_mount_path")
    folder = Path(secrets) if secrets else stack_folder(None, environment).credentials
    return GatewayApi(url, url.authorization or _authorization(folder))


def gateway_url(option: str | None, environment: Mapping[str, str]) -> str:
    """The URL of the option or the variable; else that of this user's stack, or the default."""
    named = option or environment.get("OPENFAAS_URL")
    if named:
        return named
    running = stack_folder(None, environment).running()
    return _DEFAULT_URL if running is None else running.gateway


def _authorization(folder: Path) -> str:
    """The folder's user and password; empty if it has none: a gateway may require no login."""
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
