"""One browser for all tests of the page, and what they look at."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.e2e.page.opener import Opener
from tests.kit import needs
from tests.kit.page.browser import Browser, browser
from tests.kit.page.generated_cluster import GeneratedCluster
from tests.kit.page.served_page import calm

pytestmark = pytest.mark.group("page", seconds=180)  # of all modules here


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
