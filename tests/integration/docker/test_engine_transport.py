"""Requests to an Engine over TCP, with TLS and without, and to other servers."""

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway_ext.errors import BadRequest, ProviderFailed
from gateway_ext.providers.docker.engine import EngineClient
from gateway_ext.providers.http_api import ServerAway, ServerRefused
from tests.kit import needs
from tests.kit.fakes.fake_engine import FakeEngine


@contextlib.asynccontextmanager
async def opened(url: str, tls: Path | None = None) -> AsyncIterator[EngineClient]:
    client = EngineClient(url, "g", tls)
    client.open()
    try:
        yield client
    finally:
        await client.close()


def certificates(folder: Path) -> Path:
    """As Docker has them: one for both ends will do."""
    needs.command("openssl", "openssl")
    options = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=engine"
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    name = ["-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", *options.split(), *name, *files]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "ca.pem").write_bytes((folder / "cert.pem").read_bytes())
    return folder


async def test_engine_is_asked_over_tcp(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path / "unused")
    await engine.start(tcp=True)
    async with opened(engine.url) as client:
        assert await client.containers() == []
    await engine.stop()


async def test_engine_is_asked_over_tls_by_who_has_a_certificate(tmp_path: Path) -> None:
    folder = certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=folder / "ca.pem")
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    context.verify_mode = ssl.CERT_REQUIRED

    engine = FakeEngine(tmp_path / "unused")
    await engine.start(context, tcp=True)
    async with opened(engine.url, folder) as client:
        assert await client.containers() == []
    async with opened(engine.url) as plain:
        with pytest.raises(ProviderFailed):
            await plain.containers()
    await engine.stop()


async def test_start_is_refused_when_certificates_are_missing(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="docker_tls_dir"):
        EngineClient("tcp://127.0.0.1:1", "g", tmp_path).open()


async def test_engine_that_does_not_answer_is_away(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(silent, tmp_path / "s")
    async with opened(f"unix://{tmp_path / 's'}") as client:
        with pytest.raises(ServerAway, match="no answer within"):
            await client.call("GET", "/info", within_s=0.1)
    server.close()
    async with opened(f"unix://{tmp_path / 'nothing'}") as client:
        with pytest.raises(ServerAway, match="cannot be reached"):
            await client.call("GET", "/info")


async def test_server_that_is_no_engine_is_reported(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path / "s")
    engine.version = "none"
    await engine.start()
    async with opened(engine.url) as client:
        with pytest.raises(ProviderFailed, match="is no Docker Engine"):
            await client.call("GET", "/info")
        engine.version = "1.41"
        with pytest.raises(ServerRefused, match="page not found") as refused:
            await client.call("GET", "/nothing/there")
        assert refused.value.status == 404
    await engine.stop()
