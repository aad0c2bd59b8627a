"""Asks a scheduler over HTTP, wherever its leader is."""

import argparse
import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from gpufaas.credentials import add_secret_option, cluster_secret
from gpufaas.errors import CommandError
from gpufaas.stack.folder import stack_folder
from scheduler.service.access import Role, token

DEFAULT_URL = "http://127.0.0.1:7700"
_TIMEOUT_S = 10.0
_MISDIRECTED = 421
_MOST_HOPS = 4


class NoAnswer(CommandError):
    """No scheduler answered."""


class Remote:
    """A scheduler, or several of which one leads."""

    def __init__(self, urls: tuple[str, ...], bearer: str) -> None:
        self._urls = urls
        self._bearer = bearer

    def get(self, path: str, **query: object) -> Any:
        """What is there; CommandError says why there is no answer."""
        text = urlencode({name: value for name, value in query.items() if value is not None})
        return self._ask("GET", f"{path}?{text}" if text else path, None)

    def post(self, path: str, **query: object) -> Any:
        """Have something done."""
        text = urlencode({name: value for name, value in query.items() if value is not None})
        return self._ask("POST", f"{path}?{text}" if text else path, None)

    def put(self, path: str, body: Mapping[str, object]) -> Any:
        """Have something be so."""
        return self._ask("PUT", path, json.dumps(body).encode())

    def _ask(self, method: str, path: str, body: bytes | None) -> Any:
        failure: CommandError = NoAnswer("no scheduler named")
        for url in self._urls:
            try:
                return self._follow(url, method, path, body)
            except NoAnswer as error:
                failure = error
        raise failure

    def _follow(self, url: str, method: str, path: str, body: bytes | None) -> Any:
        for _ in range(_MOST_HOPS):
            status, said = self._once(url, method, path, body)
            if status == _MISDIRECTED and "leader" in said:
                url = said["leader"]
                continue
            if status >= http.client.BAD_REQUEST:
                message = said.get("message", "") if isinstance(said, dict) else ""
                kind = NoAnswer if status == http.client.SERVICE_UNAVAILABLE else CommandError
                raise kind(message or f"{url} answers {status}")
            return said
        raise NoAnswer(f"{url}: every scheduler names another one as the leader")

    def _once(self, url: str, method: str, path: str, body: bytes | None) -> tuple[int, Any]:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(parts.netloc, timeout=_TIMEOUT_S)
        headers = {"Authorization": f"Bearer {self._bearer}", "Content-Type": "application/json"}
        try:
            connection.request(method, parts.path.rstrip("/") + path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            return answer.status, json.loads(content) if content else {}
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoAnswer(f"no scheduler answers at {url}: {error}") from error
        finally:
            connection.close()


def add_scheduler_options(parser: argparse.ArgumentParser) -> None:
    """Which scheduler to ask, and how to be let in."""
    add = parser.add_argument
    add(
        "--scheduler",
        metavar="URL[,URL]",
        help=f"any scheduler of the cluster (GPUFAAS_SCHEDULER, else {DEFAULT_URL})",
    )
    add_secret_option(parser)
    add("--json", action="store_true", help="print JSON")


def remote(options: argparse.Namespace) -> Remote:
    """The scheduler that the options and the environment name."""
    environment: Mapping[str, str] = options.environment
    urls = scheduler_urls(options.scheduler, environment)
    bearer = environment.get("GPUFAAS_TOKEN")
    if not bearer:
        bearer = token(cluster_secret(options.secret_file, environment), Role.ADMIN)
    return Remote(urls, bearer)


def scheduler_urls(named: str | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Those that are named, or that of the stack that is up on this machine, or the usual one."""
    found = named or environment.get("GPUFAAS_SCHEDULER")
    if not found:
        running = stack_folder(None, environment).running()
        found = DEFAULT_URL if running is None else running.scheduler
    urls = tuple(url.strip() for url in found.split(",") if url.strip())
    for url in urls:
        if urlsplit(url).scheme not in {"http", "https"}:
            raise CommandError(f"{url!r} is no http:// or https:// URL")
    return urls


def in_path(name: str) -> str:
    """A name as a part of a URL's path."""
    return quote(name, safe="/")
