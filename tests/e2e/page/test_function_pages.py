"""What a function's page can do in the browser of a logged-in administrator, in a real Chromium."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.page.function_pages import VICTIM, FunctionPages, function_pages
from tests.kit.page.browser import Browser, Page
from tests.kit.page.page_world import PASSWORD, USER
from tests.kit.waiting import wait_until

_LIST = """fetch('/system/functions', { credentials: 'include' })
    .then((answer) => answer.text(), (error) => error.name)"""
_SCALE = """fetch('/system/scale-function/victim', {
    method: 'POST', credentials: 'include', mode: 'MODE', headers: HEADERS,
    body: JSON.stringify({ serviceName: 'victim', replicas: 5 }),
}).then((answer) => answer.status, (error) => error.name)"""
_FRAME = """new Promise((resolve) => {
    const frame = document.createElement('iframe');
    frame.onload = () => resolve(true);
    frame.src = '/ui/';
    document.body.append(frame);
})"""
_FRAMED = """(() => {
    try { return frames[0].document.title } catch (error) { return error.name }
})()"""
_WORKER = """(async () => {
    try {
        await navigator.serviceWorker.register('/function/evil/worker.js', { scope: '/' });
        return 'registered';
    } catch (error) {
        return error.name;
    }
})()"""
ORIGIN = "self.origin"


@pytest.fixture(scope="module")
def gateway() -> Iterator[FunctionPages]:
    with function_pages() as found:
        yield found


@contextmanager
def an_administrator(chromium: Browser, gateway: FunctionPages) -> Iterator[Page]:
    """A browser that has the administrator's credentials, and shows the function's page."""
    with chromium.page(credentials=(USER, PASSWORD)) as page:
        page.open(gateway.at("/ui"))
        assert page.status == 200
        page.open(gateway.url())
        assert page.run("document.title") == "works"
        yield page


def scale(mode: str, headers: str = "{}") -> str:
    return _SCALE.replace("MODE", mode).replace("HEADERS", headers)


def test_page_works_but_acts_as_nobody(chromium: Browser, gateway: FunctionPages) -> None:
    with an_administrator(chromium, gateway) as page:
        assert page.run(ORIGIN) == "null"
        data = f"fetch('{gateway.url('/data')}').then((answer) => answer.json())"
        assert page.run(data) == {"works": True}
        assert page.run(_LIST) == "TypeError"
        assert page.run(scale("no-cors")) == "TypeError"
        assert page.run(scale("cors")) == "TypeError"
        as_json = "{ 'content-type': 'application/json', 'x-requested-with': 'gpufaas' }"
        assert page.run(scale("cors", as_json)) == "TypeError"
        assert page.run(_WORKER) == "SecurityError"
        assert page.run("(() => { try { return localStorage.length } catch { return -1 } })()") < 0
    assert gateway.provider.scalings == []


@pytest.mark.parametrize("action", ["/system/scale-function/victim", "/function/evil/onward"])
def test_form_of_the_page_changes_nothing(
    chromium: Browser, gateway: FunctionPages, action: str
) -> None:
    """Sent there at once, or by a redirect of the function's."""
    with an_administrator(chromium, gateway) as page:
        page.run(f"document.forms[0].action = '{action}'; document.forms[0].submit()")
        # No script says where the page is: the way to another one cuts it off.
        refused = f"{gateway.at('/system/scale-function/victim')}: 403"
        wait_until(lambda: refused in page.trouble.failed, "the form is refused")
        assert page.status == 403
    assert gateway.provider.scalings == []


def test_ui_is_not_framed(chromium: Browser, gateway: FunctionPages) -> None:
    with an_administrator(chromium, gateway) as page:
        page.run(_FRAME)
        # Without credentials for a frame of another origin, or refused although there are some.
        assert page.trouble.failed[0].startswith(f"{gateway.at('/ui/')}: 40")


@pytest.mark.parametrize("path", ["/weaker", "/weaker-twice"])
def test_policy_of_the_function_opens_no_sandbox(
    chromium: Browser, gateway: FunctionPages, path: str
) -> None:
    with an_administrator(chromium, gateway) as page:
        page.open(gateway.url(path))
        assert (page.run("document.title"), page.run(ORIGIN)) == ("works", "null")


def test_cookies_reach_no_other_path_and_the_rest_of_the_host_is_left_alone(
    chromium: Browser, gateway: FunctionPages
) -> None:
    with an_administrator(chromium, gateway) as page:
        page.open(gateway.url("/cookies"))
        cookies = page.ask("Network.getAllCookies")["cookies"]
        paths = {cookie["name"]: cookie["path"] for cookie in cookies}
        assert paths == {"everywhere": "/function/evil", "below": "/function/evil/x"}


def test_password_of_the_administrator_reaches_no_function(
    chromium: Browser, gateway: FunctionPages
) -> None:
    """Not even one that asks for it in the name of the gateway."""
    with an_administrator(chromium, gateway) as page:
        page.open(gateway.url("/challenge"))
        wait_until(lambda: gateway.got[-1].target == "/challenge", "the function was called")
    assert [got.header("authorization") for got in gateway.got] == [None] * len(gateway.got)


def test_pages_have_the_origin_of_a_host_of_their_own(chromium: Browser) -> None:
    with (
        function_pages(function_hosts=("localhost",)) as gateway,
        an_administrator(chromium, gateway) as page,
    ):
        assert page.run(ORIGIN) == "null"
        page.open(gateway.url(host="localhost"))
        assert page.run(ORIGIN) == gateway.at("", "localhost")
        assert "nothing is at /system/functions" in page.run(_LIST)
        page.open(gateway.at("/ui/", "localhost"))
        assert page.status == 404


def test_attacks_succeed_when_there_is_no_sandbox(chromium: Browser) -> None:
    """Or the tests above would show nothing."""
    with (
        function_pages(function_hosts=("*",)) as gateway,
        an_administrator(chromium, gateway) as page,
    ):
        assert VICTIM.name in page.run(_LIST)
        assert page.run(scale("cors")) == 202
        assert gateway.provider.scalings == [(VICTIM, 5)]
        assert page.run(_WORKER) == "registered"
        page.run(_FRAME)  # what the page forbids by itself
        assert page.run(_FRAMED) == "SecurityError"
