"""The upstream provider against providers that answer as those of other people do, or badly."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from gateway_ext.calls.function_table import Functions
from gateway_ext.errors import BadRequest, GatewayError, ProviderFailed, Unsupported
from gateway_ext.model import Deployment, FunctionId, Namespace
from gateway_ext.providers.upstream.provider import UpstreamProvider
from gateway_ext.settings import GatewaySettings
from tests.kit.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(180, func_only=True)

F = FunctionId("openfaas-fn", "f")
LIST, SHOW, DEPLOY = "GET /system/functions", "GET /system/function/f", "POST /system/functions"
# As Go writes it: a time with nanoseconds, fields that are zero left out, labels that are null.
SHOWN = {
    "name": "f",
    "image": "i",
    "namespace": "openfaas-fn",
    "labels": None,
    "annotations": None,
    "replicas": 1,
    "createdAt": "2026-01-02T03:04:05.123456789Z",
}

Answers = dict[str, web.Response]


@asynccontextmanager
async def provider_of(answers: Answers, folder: Path) -> AsyncIterator[UpstreamProvider]:
    """One whose other side answers so, and everything else with 404."""

    async def answer(request: web.Request) -> web.Response:
        found = answers.get(f"{request.method} {request.path}")
        if found is None:
            return web.Response(status=404)
        return web.Response(body=found.body, status=found.status, headers=found.headers)

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    settings = GatewaySettings(
        upstream_url=f"http://127.0.0.1:{runner.addresses[0][1]}",
        state_dir=str(folder),
        upstream_timeout_s=PATIENCE_S,
    )
    provider = UpstreamProvider(settings)
    try:
        yield provider
    finally:
        await provider.close()
        await runner.cleanup()


async def test_a_provider_without_namespaces_has_the_default_one(tmp_path: Path) -> None:
    answers = {LIST: web.json_response([SHOWN]), SHOW: web.json_response(SHOWN)}
    functions = Functions()
    async with provider_of(answers, tmp_path) as provider:
        await provider.start(functions)
        assert await provider.namespaces() == [Namespace("openfaas-fn")]
        known = functions.by_path(b"f")
        assert known is not None
        assert (known.endpoints, known.wanted) == ((), 1)
        status = await provider.function(F, usage=True)
        assert status.deployment == Deployment(F, "i")
        assert status.created_at.microsecond == 123456
        answers["POST /system/namespace/"] = web.Response(status=501)
        with pytest.raises(Unsupported):
            await provider.create_namespace(Namespace("team"))


async def test_null_is_an_empty_list(tmp_path: Path) -> None:
    answers = {LIST: web.Response(text="null"), "GET /system/secrets": web.Response(text="null")}
    async with provider_of(answers, tmp_path) as provider:
        await provider.start(Functions())
        assert await provider.functions("openfaas-fn") == []
        assert await provider.secrets("openfaas-fn") == []


@pytest.mark.parametrize(
    ("answer", "kind", "why"),
    [
        (web.Response(status=401), ProviderFailed, "upstream_user or upstream_password_file"),
        (
            web.Response(status=302, headers={"Location": "http://else/"}),
            ProviderFailed,
            "it is at http://else/ now",
        ),
        (web.Response(status=500, text="out of order"), ProviderFailed, "500: out of order"),
        (web.Response(status=500), ProviderFailed, "no reason given"),
        (web.Response(status=400, text="bad label"), BadRequest, "400: bad label"),
        (web.Response(text="<html>"), ProviderFailed, "is not JSON"),
        (web.Response(text="{}"), ProviderFailed, "a list is expected"),
        (web.json_response(["f"]), ProviderFailed, "must be a JSON object"),
        (web.json_response([{"name": 1}]), ProviderFailed, "name must be a text"),
        (web.json_response([SHOWN | {"createdAt": "now"}]), ProviderFailed, "createdAt"),
        (web.json_response([SHOWN | {"replicas": "two"}]), ProviderFailed, "replicas must be"),
    ],
)
async def test_an_answer_that_helps_nobody_is_told_clearly(
    answer: web.Response, kind: type[GatewayError], why: str, tmp_path: Path
) -> None:
    async with provider_of({LIST: answer}, tmp_path) as provider:
        with pytest.raises(kind) as caught:
            await provider.start(Functions())
        assert why in str(caught.value)


async def test_a_deployment_that_is_refused_leaves_our_part_as_it_was(tmp_path: Path) -> None:
    answers = {LIST: web.json_response([])}
    async with provider_of(answers, tmp_path) as provider:
        await provider.start(Functions())
        answers[DEPLOY] = web.Response(status=500, text="no room")
        wanted = Deployment(F, "i", labels={"com.gpufaas.batch": "2"})
        with pytest.raises(ProviderFailed, match="no room"):
            await provider.deploy(wanted, update=False)
        assert (
            not (tmp_path / "upstream.json").exists()
            or "batch" not in (tmp_path / "upstream.json").read_text()
        )


async def test_a_provider_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    settings = GatewaySettings(upstream_url="http://127.0.0.1:1/", state_dir=str(tmp_path))
    provider = UpstreamProvider(settings)
    with pytest.raises(ProviderFailed, match=r"http://127\.0\.0\.1:1/system/namespaces"):
        await provider.start(Functions())
    await provider.close()


async def test_a_provider_that_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        await release.wait()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        settings = GatewaySettings(
            upstream_url=f"http://127.0.0.1:{port}",
            state_dir=str(tmp_path),
            upstream_timeout_s=0.2,
        )
        with pytest.raises(ProviderFailed, match=r"did not answer within 0\.2 s"):
            await UpstreamProvider(settings).start(Functions())
        release.set()


def test_a_password_file_that_is_missing_is_named(tmp_path: Path) -> None:
    settings = GatewaySettings(
        upstream_url="http://f/", state_dir=str(tmp_path), upstream_password_file="/no/such"
    )
    with pytest.raises(ProviderFailed, match="/no/such"):
        UpstreamProvider(settings)
