"""Requests to a scheduler's API; a follower's redirection to the leader is followed."""

import argparse
import http.client
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from gpufaas.errors import CommandError
from gpufaas.options.shared import add_secret_option, cluster_secret, default_secret_file
from gpufaas.remote.http_request import HttpUrl, NoAnswer, http_url, is_at, open_response
from gpufaas.stack_folder import WHICH_STACK, stack_folder
from scheduler.service.access import ApiRole, token

_MISDIRECTED = 421
_MOST_REDIRECTIONS = 4
# The request id of a gateway's call is the call's id, this character and a number.
_AFTER_CALL_ID = "~"


class SchedulerApi:
    """The schedulers of one cluster; requests go to the leader, whichever URL leads to it."""

    def __init__(self, urls: Sequence[str], bearer: str) -> None:
        self._urls = [http_url(url, "scheduler") for url in urls]
        self._bearer = bearer

    def get(self, path: str, **query: object) -> Any:
        """The answer to a GET; CommandError says why there is none."""
        return self._request("GET", _with_query(path, query), None)

    def post(self, path: str, *, once: bool = False, **query: object) -> Any:
        """The answer to a POST; CommandError says why there is none.

        What is given `once` is not given to another scheduler where it may have been received.
        """
        return self._request("POST", _with_query(path, query), None, once=once)

    def put(self, path: str, body: Mapping[str, object]) -> Any:
        return self._request("PUT", path, json.dumps(body).encode())

    def delete(self, path: str) -> Any:
        """The answer to a DELETE, which is given once; CommandError says why there is none."""
        return self._request("DELETE", path, None, once=True)

    def _request(self, method: str, path: str, body: bytes | None, *, once: bool = False) -> Any:
        failure: CommandError = NoAnswer("no scheduler named")
        for url in self._urls:
            try:
                return self._request_leader(url, method, path, body)
            except NoAnswer as error:
                failure = error
                if once and error.received:
                    raise CommandError(f"{error}; it may be carried out") from error
        raise failure

    def _request_leader(self, url: HttpUrl, method: str, path: str, body: bytes | None) -> Any:
        for _ in range(_MOST_REDIRECTIONS):
            status, answer = self._request_once(url, method, path, body)
            if status == _MISDIRECTED and "leader" in answer:
                url = http_url(answer["leader"], "leader")
                continue
            if status == http.client.UNAUTHORIZED:
                raise CommandError(
                    f"{url} has another secret than this command: name its file with --secret-file"
                )
            if status >= http.client.BAD_REQUEST:
                message = answer.get("message", "") if isinstance(answer, dict) else ""
                kind = NoAnswer if status == http.client.SERVICE_UNAVAILABLE else CommandError
                raise kind(message or f"{url} answers {status}")
            return answer
        raise NoAnswer(f"{url}: every scheduler names another one as the leader")

    def _request_once(
        self, url: HttpUrl, method: str, path: str, body: bytes | None
    ) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self._bearer}", "Content-Type": "application/json"}
        with open_response(url, "scheduler", method, path, body=body, headers=headers) as response:
            content = response.read()
        try:
            return response.status, json.loads(content) if content else {}
        except ValueError as error:
            why = f"no scheduler answers at {url}: {error}"
            raise NoAnswer(why, received=True) from error


def add_scheduler_options(parser: argparse.ArgumentParser) -> None:
    which = "any scheduler of the cluster (GPUFAAS_SCHEDULER, else the stack's)"
    parser.add_argument("--scheduler", metavar="URL[,URL]", help=which)
    parser.epilog = WHICH_STACK
    add_secret_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def scheduler_api(options: argparse.Namespace) -> SchedulerApi:
    """The scheduler that the options and the environment name, or the stack's with its secret."""
    urls = scheduler_urls(options.scheduler, options.environment)
    return SchedulerApi(urls, _bearer(options, urls))


def _bearer(options: argparse.Namespace, urls: Sequence[str]) -> str:
    """The token of the named secret, the named one, or that of the stack for its scheduler."""
    environment: Mapping[str, str] = options.environment
    stack, secret_file = stack_folder(None, environment), options.secret_file
    if not secret_file and not _named(options.scheduler, environment):
        secret_file = str(stack.secret_file)
    if not secret_file:
        bearer = environment.get("GPUFAAS_TOKEN")
        if bearer:
            return bearer
        running = stack.running()
        stack_url = running.scheduler if running else None
        servers = [http_url(url, "scheduler") for url in urls]
        is_ours = any(is_at(server, stack_url) for server in servers)
        if default_secret_file(environment) == stack.secret_file and not is_ours:
            raise CommandError(
                f"{stack.secret_file} is the secret of the stack that is up in {stack.root}: "
                f"name that of {servers[0]} with --secret-file"
            )
    return token(cluster_secret(secret_file, environment), ApiRole.ADMIN)


def scheduler_urls(option: str | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The URLs of the option or the variable; else that of the stack that is up."""
    named = _named(option, environment)
    if not named:
        return (stack_folder(None, environment).up("--scheduler URL").scheduler,)
    urls = tuple(url.strip() for url in named.split(",") if url.strip())
    for url in urls:
        http_url(url, "scheduler")
    return urls


def _named(option: str | None, environment: Mapping[str, str]) -> str | None:
    return option or environment.get("GPUFAAS_SCHEDULER")


def in_path(name: str) -> str:
    """A name, encoded as a part of a URL's path."""
    return quote(name, safe="/")


def request_story(scheduler: SchedulerApi, request: str) -> dict[str, Any]:
    """A request's decisions, by the request's id or by the id of the gateway's call."""
    ids: list[str] = scheduler.get("/explain")
    of_call = (
        request_id for request_id in ids if request_id.partition(_AFTER_CALL_ID)[0] == request
    )
    story: dict[str, Any] = scheduler.get(f"/explain/{in_path(next(of_call, request))}")
    return story


def _with_query(path: str, query: Mapping[str, object]) -> str:
    text = urlencode({name: value for name, value in query.items() if value is not None})
    return f"{path}?{text}" if text else path
