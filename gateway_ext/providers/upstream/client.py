"""Requests to a faas-provider over HTTP; errors name the URL and the reason."""

import io
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp

from common.time_limits import time_limit
from gateway_ext.errors import BadRequest, GatewayError, ProviderFailed, Unsupported
from gateway_ext.openfaas.basic_auth import BasicCredentials
from gateway_ext.providers.http_api import CONNECT_S, all_lines, refusal

_SHOWN = 500
_ACCEPTED = frozenset({200, 201, 202, 204})
_ELSEWHERE = frozenset({301, 302, 303, 307, 308})
_UNSUPPORTED = frozenset({405, 501})
_BAD, _UNAUTHORIZED, _ABSENT, _CONFLICT = 400, 401, 404, 409


class ProviderSite(NamedTuple):
    """Host and port of a provider, and the prefix of all its paths."""

    host: str
    port: int
    path: str

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL without a slash at its end."""
        return f"http://{self.address}{self.path}"


def provider_site(url: str) -> ProviderSite:
    """The site that a URL names; a slash at its end makes no difference."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadRequest(f"upstream_url {url!r}: {error}") from error
    if parts.scheme != "http" or not parts.hostname or parts.query or parts.fragment:
        raise BadRequest(f"upstream_url {url!r}: http://HOST:PORT/ is expected (calls use no TLS)")
    if parts.username is not None:
        raise BadRequest("upstream_url names a user: use upstream_user and upstream_password_file")
    return ProviderSite(parts.hostname, port or 80, parts.path.rstrip("/"))


class ProviderHttp:
    """One provider, called with the configured credentials."""

    def __init__(self, site: ProviderSite, user: str, password: str, timeout_s: float) -> None:
        self._site = site
        credentials = BasicCredentials(user, password)
        self._headers = {"Authorization": credentials.header} if user else {}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: object = None,
        *,
        missing: GatewayError | None = None,
        exists: GatewayError | None = None,
    ) -> bytes:
        """The body of a successful answer; 404 raises `missing`, 409 raises `exists`."""
        sending = self._sent(method, path, query or {}, body, missing=missing, exists=exists)
        try:
            async with time_limit(self._timeout_s), sending as answer:
                return await answer.read()
        except TimeoutError as error:
            raise ProviderFailed(
                f"{self._site.url}{path} did not answer within {self._timeout_s:g} s"
            ) from error

    def lines(
        self, path: str, query: Mapping[str, str], missing: GatewayError
    ) -> AsyncGenerator[bytes, None]:
        sending = self._sent("GET", path, query, missing=missing)
        return all_lines(sending, f"{self._site.url}{path}")

    @asynccontextmanager
    async def _sent(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: object = None,
        *,
        missing: GatewayError | None,
        exists: GatewayError | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None, "opened before"
        url = self._site.url + path
        request = self._session.request(
            method,
            url,
            params=query,
            data=None if body is None else io.BytesIO(json.dumps(body).encode()),
            headers={} if body is None else {"Content-Type": "application/json"},
            allow_redirects=False,
        )
        try:
            async with request as answer:
                if answer.status == _ABSENT and missing is not None:
                    raise missing
                if answer.status == _CONFLICT and exists is not None:
                    raise exists
                if answer.status not in _ACCEPTED:
                    raise await self._refused(answer, f"{method} {path}")
                yield answer
        except aiohttp.ClientError as error:
            raise ProviderFailed(f"{url}: {str(error) or type(error).__name__}") from error

    async def _refused(self, answer: aiohttp.ClientResponse, asked: str) -> GatewayError:
        status = answer.status
        where = f"{self._site.url} answers {asked} with {status}"
        if status == _UNAUTHORIZED:
            return ProviderFailed(f"{where}: upstream_user or upstream_password_file is wrong")
        if status in _ELSEWHERE:
            return ProviderFailed(f"{where}: it is at {answer.headers.get('Location', '?')} now")
        reason = (await refusal(answer))[:_SHOWN].decode("utf-8", "replace").strip()
        text = f"{where}: {reason or 'no reason given'}"
        if status in _UNSUPPORTED:
            return Unsupported(text)
        return BadRequest(text) if status == _BAD else ProviderFailed(text)
