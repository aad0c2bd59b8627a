"""What a person sees on the page of shares and quotas."""

from typing import Any

import pytest

from tests.e2e.page.opener import Opener
from tests.kit.page.browser import Viewport
from tests.kit.page.generated_cluster import GeneratedCluster

GIB = 1 << 30
USE: dict[str, Any] = {
    "gpu_s": 12.0, "resident_bytes": GIB, "leases": 3, "waiting": 7, "held_back": 5,
    "refused": {"waiting": 4, "gpu_s": 38},
}  # fmt: skip
LIMITED: dict[str, Any] = {
    "weight": 2.5, "priority": -1, "gpu_s": 30.0, "window_s": 60.0, "resident_bytes": 2 * GIB,
    "leases": None, "waiting": 7,
}  # fmt: skip
UNLIMITED = LIMITED | dict.fromkeys(("gpu_s", "resident_bytes", "waiting"))
ROWS = [
    {"owner": "<b>team", "set_by": "operator", "terms": LIMITED, "use": USE},
    {"owner": "team/report", "set_by": "function", "terms": UNLIMITED, "use": USE},
]
CELLS = (
    "[...document.querySelectorAll('.owners tbody tr')].map((row) => row.innerText.split('\\t'))"
)


def test_use_is_shown_beside_each_limit(
    opened: Opener, url: str, cluster: GeneratedCluster
) -> None:
    page = opened(url)
    assert page.run("document.getElementById('owners').hidden") is True
    cluster.owners = {"count": 2, "rows": ROWS}
    page.until("document.querySelectorAll('.owners tbody tr').length === 2")
    limited, unlimited = page.run(CELLS)
    shown = [cell.strip() for cell in limited]
    assert shown == [
        "<b>team", "2.50", "-1", "12.0 s of 30.0 s in 60.0 s", "1 GiB of 2 GiB", "3", "7 of 7",
        "5", "42",
    ]  # fmt: skip
    assert [cell.strip() for cell in unlimited[3:7]] == ["12.0 s", "1 GiB", "3", "7"]
    widths = page.run(
        "[...document.querySelectorAll('.owners tbody tr:first-child .share-track')]"
        ".map((one) => one.hidden ? null : one.firstChild.style.width)"
    )
    assert widths == ["40%", "50%", None, "100%"]
    assert "2 owners" in page.text("#owners")
    cluster.owners = {"count": 0, "rows": []}
    page.until("document.getElementById('owners').hidden")


def test_table_says_of_how_many_it_shows_the_first(
    opened: Opener, url: str, cluster: GeneratedCluster
) -> None:
    cluster.owners = {"count": 900, "rows": ROWS}
    page = opened(url)
    page.until("document.querySelectorAll('.owners tbody tr').length === 2")
    assert "the first 2 of 900" in page.text("#owners")


@pytest.mark.parametrize("width", [320, 390])
def test_table_is_scrolled_by_itself_when_the_screen_is_a_phones(
    opened: Opener, url: str, cluster: GeneratedCluster, width: int
) -> None:
    cluster.owners = {"count": 2, "rows": ROWS}
    page = opened(url, Viewport(width, 640, 2.0, phone=True))
    page.until("document.querySelectorAll('.owners tbody tr').length === 2")
    assert page.run("document.documentElement.scrollWidth") <= width
    box = "document.querySelector('#owners .wide')"
    assert page.run(f"{box}.scrollWidth > {box}.clientWidth")
