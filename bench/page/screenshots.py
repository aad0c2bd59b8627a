"""`python -m bench.page.screenshots`: pictures of the page, for README and docs."""

import argparse
import shutil
import sys
import time
from pathlib import Path

from PIL import Image

from tests.kit.page.browser import Browser, Page, Viewport, browser
from tests.kit.page.generated_cluster import GeneratedCluster
from tests.kit.page.page_world import PASSWORD, USER
from tests.kit.page.served_page import served

_FOLDER = Path("docs/pictures")
_MOST_BYTES = 300_000
_SETTLE_S = 6.0
_RUSH, _RUSH_S = 3.0, 2.0  # more calls than usual by this factor, so that some wait
_FILLED = "document.getElementById('main')?.dataset.filled === 'yes'"
_WIDE = Viewport(1440, 1330)
_MANY = Viewport(1440, 1340)
_PHONE = Viewport(390, 1010, 2.0, phone=True)


def main() -> int:
    """Take all pictures; look at each before you commit it."""
    parser = argparse.ArgumentParser(prog="bench.page.screenshots", description=__doc__)
    parser.add_argument("--folder", type=Path, default=_FOLDER, help="where they are written to")
    folder: Path = parser.parse_args().folder
    program = shutil.which("chromium")
    if program is None:
        print("pictures need Chromium: apt-get install chromium", file=sys.stderr)
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    with browser(Path(program)) as chromium:
        few = _few()
        with served(few) as url:
            _take(chromium, url, folder / "page-light.png", _WIDE, few)
            _take(chromium, url, folder / "page-phone.png", _PHONE, few)
            _take(chromium, url, folder / "page-dark.png", _WIDE, few, dark=True)
        many = GeneratedCluster(200, 1_000)
        with served(many) as url:
            _take(chromium, url, folder / "page-200-gpus.png", _MANY, many)
    return 0


def _few() -> GeneratedCluster:
    """Twelve GPUs of three kinds: calls come, some models are pinned, one GPU drains."""
    cluster = GeneratedCluster(12, 20, seed=11)
    cluster.rate *= 0.68
    gpus = list(cluster.gpus.values())
    gpus[9].state = "draining"
    for gpu in gpus[1:9:3]:
        next(iter(gpu.residents.values())).pinned = True
    return cluster


def _take(
    chromium: Browser,
    url: str,
    path: Path,
    viewport: Viewport,
    cluster: GeneratedCluster,
    *,
    dark: bool = False,
) -> None:
    with chromium.page(viewport, dark=dark, credentials=(USER, PASSWORD)) as page:
        page.open(url)
        page.until(_FILLED)
        time.sleep(_SETTLE_S)
        usual = cluster.rate
        cluster.rate = usual * _RUSH
        time.sleep(_RUSH_S)
        cluster.rate = usual
        if dark:
            _explain(page)
        page.picture(path)
    _shrink(path)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def _explain(page: Page) -> None:
    """Open a decision that has ended, best one with a load."""
    page.run("""(() => {
        const ended = [...document.querySelectorAll("button.decision")]
          .filter((one) => one.querySelector("[data-kind=completed]"));
        const missed = ended.find((one) => one.querySelector(".badge").textContent !== "hit");
        (missed ?? ended[0]).click();
    })()""")
    page.until("document.querySelector('dialog[open]') !== null")


def _shrink(path: Path) -> None:
    """Make a PNG as small as its pixels allow."""
    with Image.open(path) as picture:
        small = picture.convert("RGB")
    small.save(path, optimize=True)
    size_bytes = path.stat().st_size
    if size_bytes > _MOST_BYTES:
        raise SystemExit(f"{path} has {size_bytes} bytes: more than {_MOST_BYTES}")


if __name__ == "__main__":
    sys.exit(main())
