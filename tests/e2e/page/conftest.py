"""One browser for all tests of the page, and what they look at."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from gateway_ext.ui.watcher_feed import PagePace
from testbed.page.browser import Browser, Page, Viewport, browser
from testbed.page.generated_cluster import GeneratedCluster
from testbed.page.page_world import PASSWORD, USER
from testbed.page.served_page import calm
from testbed.page.served_page import served as served_page
from tests.e2e.page.doing import FILLED
from tests.kit import needs

pytestmark = pytest.mark.group("page", seconds=180)  # of all modules here


class Opener:
    """Opens addresses, and says what went wrong on the pages there."""

    def __init__(self, chromium: Browser, stack: ExitStack) -> None:
        self._chromium = chromium
        self._stack = stack
        self._pages: list[Page] = []

    def __call__(
        self,
        url: str,
        viewport: Viewport = Viewport(),  # noqa: B008 - it cannot be changed
        *,
        dark: bool = False,
        credentials: tuple[str, str] = (USER, PASSWORD),
    ) -> Page:
        """Open an address and wait until it is filled."""
        made = self._chromium.page(viewport, dark=dark, credentials=credentials)
        page = self._stack.enter_context(made)
        page.open(url)
        page.until(FILLED)
        self._pages.append(page)
        return page

    @contextmanager
    def served(self, cluster: GeneratedCluster, pace: PagePace | None = None) -> Iterator[str]:
        """Serve the page of a cluster; nothing may have gone wrong while it was served.

        Two seconds after that a page asks a server that is gone, which is trouble, too.
        """
        serving = served_page(cluster) if pace is None else served_page(cluster, pace=pace)
        with serving as url:
            yield url
            self.check()

    def check(self) -> None:
        """Nothing may have gone wrong on the pages that were not checked before."""
        while self._pages:
            page = self._pages.pop()
            assert page.trouble.console == [], page.trouble
            assert page.trouble.failed == [], page.trouble


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    with browser(needs.command("chromium", "chromium")) as found:
        yield found


@pytest.fixture
def cluster() -> GeneratedCluster:
    """The one that `url` shows."""
    return calm()


@pytest.fixture
def url(opened: Opener, cluster: GeneratedCluster) -> Iterator[str]:
    with opened.served(cluster) as found:
        yield found


@pytest.fixture
def opened(chromium: Browser) -> Iterator[Opener]:
    """Opens addresses; at the end nothing may have gone wrong there."""
    with ExitStack() as stack:
        found = Opener(chromium, stack)
        yield found
        found.check()
