"""One browser for all tests of the page, and what they look at."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from testbed.page.browser import Browser, Page, Viewport, browser
from testbed.page.generated_cluster import GeneratedCluster
from testbed.page.page_world import PASSWORD, USER
from testbed.page.served_page import calm, served
from tests.e2e.page.doing import FILLED
from tests.kit import needs

Opener = Callable[..., Page]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    with browser(needs.command("chromium", "chromium")) as found:
        yield found


@pytest.fixture
def cluster() -> GeneratedCluster:
    """The one that `url` shows."""
    return calm()


@pytest.fixture
def url(cluster: GeneratedCluster) -> Iterator[str]:
    with served(cluster) as found:
        yield found


@pytest.fixture
def opened(chromium: Browser) -> Iterator[Opener]:
    """Opens an address and waits until it is filled; at the end nothing may have gone wrong."""
    pages: list[Page] = []
    with ExitStack() as stack:

        def open_(
            url: str,
            viewport: Viewport = Viewport(),  # noqa: B008 - it cannot be changed
            *,
            dark: bool = False,
            credentials: tuple[str, str] = (USER, PASSWORD),
        ) -> Page:
            made = chromium.page(viewport, dark=dark, credentials=credentials)
            page = stack.enter_context(made)
            page.open(url)
            page.until(FILLED)
            pages.append(page)
            return page

        yield open_
        for page in pages:
            assert page.trouble.console == [], page.trouble
            assert page.trouble.failed == [], page.trouble
