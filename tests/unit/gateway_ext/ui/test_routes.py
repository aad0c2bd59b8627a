"""The routes below /ui: credentials, files, headers, and orders from other sites."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from gateway_ext.ui.routes import STATIC, PagePace
from tests.kit.page.generated_cluster import GeneratedCluster
from tests.kit.page.page_world import CREDENTIALS, PageWorld, page_world
from tests.kit.waiting import eventually

pytestmark = pytest.mark.timeout(180, func_only=True)

ADMIN = {"Authorization": CREDENTIALS.header}
ORDER = {**ADMIN, "X-Requested-With": "gpufaas"}
PACE = PagePace(every_s=0.05, most_share=1.0, most_watchers=2)


@asynccontextmanager
async def page(
    cluster: GeneratedCluster | None = None, static: Path = STATIC
) -> AsyncIterator[tuple[PageWorld, aiohttp.ClientSession]]:
    """The page, and a browser that renders nothing."""
    found = cluster or GeneratedCluster(2, 3)
    async with (
        page_world(found, pace=PACE, static=static) as world,
        aiohttp.ClientSession(world.url) as session,
    ):
        yield world, session


async def test_nothing_is_shown_without_the_password() -> None:
    async with page() as (_, session):
        for path in ("/ui/", "/ui/static/main.js", "/ui/state", "/ui/events", "/ui/x"):
            async with session.get(path, allow_redirects=False) as answer:
                assert answer.status == 401, path
                assert answer.headers["www-authenticate"].startswith("Basic")
        wrong = {"Authorization": "Basic YWRtaW46d3Jvbmc="}
        async with session.get("/ui/", headers=wrong) as answer:
            assert answer.status == 401
        async with session.post("/ui/policy", json={"name": "lb"}) as answer:
            assert answer.status == 401


async def test_page_is_served_with_a_strict_policy() -> None:
    async with page() as (_, session):
        # A browser that is asked for a password here would send it to every function.
        async with session.get("/ui", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["location"]) == (308, "/ui/")
        for path in ("/ui/", "/ui/state", "/ui/static/no-such.js", "/ui/nothing"):
            async with session.get(path, headers=ADMIN) as answer:
                policy = answer.headers["content-security-policy"]
                assert "default-src 'none'" in policy
                assert "frame-ancestors 'none'" in policy
                assert "unsafe" not in policy
                assert "http" not in policy
                assert answer.headers["x-content-type-options"] == "nosniff"


async def test_files_are_asked_for_once(tmp_path: Path) -> None:
    (tmp_path / "main.js").write_text("export const one = 1;")
    async with page(static=tmp_path) as (_, session):
        async with session.get("/ui/static/main.js", headers=ADMIN) as answer:
            assert answer.headers["content-type"].startswith("text/javascript")
            assert answer.headers["cache-control"] == "private, no-cache"
            tag = answer.headers["etag"]
        again = {**ADMIN, "If-None-Match": tag}
        async with session.get("/ui/static/main.js", headers=again) as answer:
            assert (answer.status, await answer.read()) == (304, b"")
        (tmp_path / "main.js").write_text("export const two = 2222;")
        async with session.get("/ui/static/main.js", headers=again) as answer:
            assert answer.status == 200
            assert answer.headers["etag"] != tag
        async with session.head("/ui/static/main.js", headers=ADMIN) as answer:
            assert (answer.status, await answer.read()) == (200, b"")


@pytest.mark.parametrize(
    "name",
    ["../secret.js", "..%2Fsecret.js", "%2e%2e/secret.js", "/etc/passwd", "notes.txt", "sub",
     "a%00.js", "main.js/", "%2Fetc%2Fpasswd", ".hidden", "link.js"],
)  # fmt: skip
async def test_no_other_file_is_served(name: str, tmp_path: Path) -> None:
    static = tmp_path / "static"
    (static / "sub").mkdir(parents=True)
    (tmp_path / "secret.js").write_text("a secret")
    (static / "main.js").write_text("1")
    (static / "notes.txt").write_text("not a kind that we serve")
    (static / "link.js").symlink_to(tmp_path / "secret.js")

    async with page(static=static) as (world, _):
        host, _, port = world.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"GET /ui/static/{name} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        writer.write(f"{head}authorization: {CREDENTIALS.header}\r\n\r\n".encode())
        result = await reader.read()
        writer.close()
        assert b" 404 " in result.partition(b"\r\n")[0]
        assert b"a secret" not in result


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"X-Requested-With": "XMLHttpRequest"},
        {"X-Requested-With": "gpufaas", "Sec-Fetch-Site": "cross-site"},
        {"X-Requested-With": "gpufaas", "Sec-Fetch-Site": "same-site"},
        {"X-Requested-With": "gpufaas", "Origin": "https://elsewhere.example"},
        {"X-Requested-With": "gpufaas", "Origin": "null"},
    ],
)
async def test_orders_of_other_sites_are_refused(headers: Mapping[str, str]) -> None:
    cluster = GeneratedCluster(2, 3)
    async with page(cluster) as (_, session):
        model = cluster.functions[0].model
        for method, path in (
            ("POST", "/ui/policy"),
            ("POST", f"/ui/models/{model}/evict"),
            ("POST", "/ui/dead-letters/3/replay"),
            ("DELETE", "/ui/dead-letters/3"),
        ):
            sent = {**ADMIN, **headers}
            async with session.request(method, path, headers=sent, json={"name": "lb"}) as answer:
                assert answer.status == 403, path
        assert cluster.policy["name"] == "lalbo3"
        assert (cluster.ordered, 3 in cluster.letters) == ([], True)


async def test_orders_of_the_page_are_carried_out() -> None:
    cluster = GeneratedCluster(2, 3)
    async with page(cluster) as (world, session):
        browser = {**ORDER, "Sec-Fetch-Site": "same-origin", "Origin": world.url}
        choice = {"name": "netgain", "parameters": {"patience": 5}}
        async with session.post("/ui/policy", headers=browser, json=choice) as answer:
            assert answer.status == 202
        assert cluster.policy == choice
        async with session.delete("/ui/dead-letters/3", headers=browser) as answer:
            assert answer.status == 202
        async with session.post("/ui/dead-letters/4/replay", headers=ORDER) as answer:
            assert answer.status == 202
        assert list(cluster.letters) == [9]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/ui/policy", b"{", 400),
        ("/ui/policy", b"[]", 400),
        ("/ui/policy", b'{"name": 7}', 400),
        ("/ui/policy", b'{"name": "lb", "parameters": []}', 400),
        ("/ui/policy", b'{"name": "lb", "parameters": {"a": "1"}}', 400),
        ("/ui/policy", b'{"name": "none such"}', 422),
        ("/ui/models/a/b/burn", b"", 400),
        ("/ui/models/a/b/evict", b'{"gpu": ""}', 400),
        ("/ui/models/a/b/evict", b"", 404),
        ("/ui/dead-letters/99/replay", b"", 404),
        ("/ui/dead-letters/-1/replay", b"", 404),
        ("/ui/dead-letters/9999999999999999999999/replay", b"", 404),
        ("/ui/state", b"", 405),
    ],
)
async def test_orders_that_make_no_sense_are_refused_in_words(
    path: str, body: bytes, status: int
) -> None:
    async with page() as (_, session), session.post(path, headers=ORDER, data=body) as answer:
        assert answer.status == status
        assert await answer.text()


async def test_decision_is_explained() -> None:
    cluster = GeneratedCluster(2, 3)
    async with page(cluster) as (_, session):
        request = next(iter(cluster.decisions))
        async with session.get(f"/ui/decisions/{request}", headers=ADMIN) as answer:
            assert json.loads(await answer.read())["request"] == request
        async with session.get("/ui/decisions/none%20such", headers=ADMIN) as answer:
            assert answer.status == 404


async def test_times_of_a_model_are_shown() -> None:
    cluster = GeneratedCluster(2, 3)
    async with page(cluster) as (_, session):
        model = cluster.functions[0].model
        async with session.get(f"/ui/models/{model}", headers=ADMIN) as answer:
            found = json.loads(await answer.read())
        assert (found["model"], found["configured"][1]["vgpus"]) == (model, 2)
        async with session.get("/ui/models/none%20such", headers=ADMIN) as answer:
            assert answer.status == 404


async def test_events_come_as_a_stream_and_watchers_are_not_without_number() -> None:
    async with page() as (world, session), session.get("/ui/events", headers=ADMIN) as one:
        assert one.headers["content-type"].startswith("text/event-stream")
        assert one.headers["cache-control"] == "no-store"
        while b"event: change" not in await one.content.readline():
            pass
        async with session.get("/ui/events", headers=ADMIN) as two:
            await two.content.readline()
            async with session.get("/ui/events", headers=ADMIN) as three:
                assert (three.status, three.headers["retry-after"]) == (503, "10")
        await eventually(lambda: world.feed.watchers <= 1, "one is noticed to have left")
        async with session.get("/ui/events", headers=ADMIN) as again:
            assert again.status == 200
    await eventually(lambda: not world.feed.watchers, "no watcher is left")


async def test_stream_ends_with_the_gateway() -> None:
    async with page() as (world, session), session.get("/ui/events", headers=ADMIN) as answer:
        await answer.content.readline()
        world.feed.close()
        await answer.content.read()  # to its end
        async with session.get("/ui/events", headers=ADMIN) as late:
            assert late.status == 503


async def test_watcher_that_does_not_read_delays_no_other_and_is_dropped() -> None:
    cluster = GeneratedCluster(60, 300)
    cluster.rate = 300.0
    async with page(cluster) as (world, session):
        host, _, port = world.url.removeprefix("http://").partition(":")
        deaf = socket.create_connection((host, int(port)))
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = f"GET /ui/events HTTP/1.1\r\nhost: x\r\nauthorization: {CREDENTIALS.header}\r\n\r\n"
        deaf.sendall(head.encode())
        async with session.get("/ui/events", headers=ADMIN) as answer:
            reported = 0
            while reported < 40:
                reported += (await answer.content.readline()).startswith(b"event: change")
            assert world.feed.watchers == 2
        deaf.close()
        await eventually(lambda: not world.feed.watchers, "no watcher is left")
