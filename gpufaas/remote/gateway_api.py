"""Requests to a gateway with its user and password: the named gateway, or this user's stack's."""

import argparse
import http.client
import json
from base64 import b64encode
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

from gpufaas.errors import CommandError
from gpufaas.remote.http_request import TIMEOUT_S, HttpUrl, http_url, is_at, open_response
from gpufaas.stack_folder import WHICH_STACK, stack_folder

_MOST_SHOWN = 4_000  # a file may have many problems
_DONE = frozenset({http.client.OK, http.client.ACCEPTED})
_USER_FILE, _PASSWORD_FILE = "basic-auth-user", "basic-auth-password"


class GatewayApi:
    """One gateway, with the authorization that requests to it carry."""

    def __init__(self, url: HttpUrl, authorization: str, another_stack: str = "") -> None:
        """`another_stack` tells why there is no authorization, should the gateway want one."""
        self.url = url
        self._authorization = authorization
        self._needs_login = another_stack or (
            f"{url} needs a login: name the folder of {_USER_FILE} and {_PASSWORD_FILE} with "
            "--secrets-dir"
        )

    def get(self, path: str) -> Any:
        """The answer to a GET; CommandError says why there is none."""
        with self.call("GET", path) as response:
            status, body = response.status, response.read()
            is_text = response.headers.get_content_type() == "text/plain"
        if status == http.client.UNAUTHORIZED or (is_text and status != http.client.OK):
            self.refuse(status, body)
        try:
            content = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise CommandError(f"{self.url} answers {status}, and no JSON") from error
        if status != http.client.OK:
            message = content.get("message") if isinstance(content, dict) else ""
            raise CommandError(message or f"{self.url} answers {status}")
        return content

    def order(self, method: str, path: str, body: bytes) -> None:
        """Have the gateway do something; CommandError with its reason if it does not."""
        with self.call(method, path, body) as response:
            if response.status not in _DONE:
                self.refuse(response.status, response.read())

    def call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        longest_silence_s: float = TIMEOUT_S,
    ) -> AbstractContextManager[http.client.HTTPResponse]:
        """The response of whatever status, while it arrives."""
        sent = dict(headers or {})
        if self._authorization:
            sent["Authorization"] = self._authorization
        return open_response(
            *(self.url, "gateway", method, path),
            body=body,
            headers=sent,
            timeout_s=longest_silence_s,
        )

    def refuse(self, status: int, body: bytes) -> NoReturn:
        """Raise the reason, which is JSON or plain text."""
        if status == http.client.UNAUTHORIZED:
            raise CommandError(self._needs_login)
        text = body.decode("utf-8", "replace").strip()
        raise CommandError(f"{self.url} answers {status}: {text[:_MOST_SHOWN]}")


def add_gateway_options(parser: argparse.ArgumentParser) -> None:
    add_gateway_url_option(parser)
    secrets_help = f"with {_USER_FILE} and {_PASSWORD_FILE}"
    parser.add_argument("--secrets-dir", metavar="DIR", help=secrets_help)


def add_gateway_url_option(parser: argparse.ArgumentParser) -> None:
    """The option for the gateway's URL, for commands that need no login."""
    parser.add_argument("--gateway", metavar="URL", help="(OPENFAAS_URL, else the stack's)")
    parser.epilog = WHICH_STACK


def gateway_api(options: argparse.Namespace) -> GatewayApi:
    """The gateway that the options and the environment name.

    A login in the URL is used before that of the folder of secrets. No other gateway gets the login
    of the stack that is up.
    """
    environment: Mapping[str, str] = options.environment
    url = http_url(gateway_url(options.gateway, environment), "gateway")
    if url.authorization:
        return GatewayApi(url, url.authorization)
    if secrets := options.secrets_dir or environment.get("secret_mount_path"):
        return GatewayApi(url, _authorization(Path(secrets)))
    stack = stack_folder(None, environment)
    running = stack.running()
    if is_at(url, running.gateway if running else None):
        return GatewayApi(url, _authorization(stack.credentials))
    another_stack = (
        f"OPENFAAS_URL names {url}, which is not the stack in {stack.root}: unset it, or name its "
        "--secrets-dir"
    )
    return GatewayApi(url, "", another_stack if running and not options.gateway else "")


def gateway_url(option: str | None, environment: Mapping[str, str]) -> str:
    """The URL of the option or the variable; else that of the stack that is up."""
    named = option or environment.get("OPENFAAS_URL")
    return named or stack_folder(None, environment).up("--gateway URL").gateway


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
        raise CommandError(f"{folder}: {error.strerror}") from error
    return "Basic " + b64encode(f"{user}:{password}".encode()).decode()
