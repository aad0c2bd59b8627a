"""Pages that tests open, and what went wrong there."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from gateway_ext.ui.routes import PagePace
from tests.e2e.page.doing import FILLED
from tests.kit.page.browser import Browser, Page, Viewport
from tests.kit.page.generated_cluster import GeneratedCluster
from tests.kit.page.page_world import PASSWORD, USER
from tests.kit.page.served_page import served


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
        serving = served(cluster) if pace is None else served(cluster, pace=pace)
        with serving as url:
            yield url
            self.check()

    def check(self) -> None:
        """Nothing may have gone wrong on the pages that were not checked before."""
        while self._pages:
            page = self._pages.pop()
            assert page.trouble.console == [], page.trouble
            assert page.trouble.failed == [], page.trouble
