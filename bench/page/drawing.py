"""`python -m bench.page.drawing`: how long the page takes in Chromium until everything is drawn."""

import argparse
import shutil
import sys
import time
from pathlib import Path
from statistics import median

from bench.measure.report import BenchReport, load_average
from gateway_ext.ui.routes import PagePace
from tests.kit.page.browser import Browser, Page, browser
from tests.kit.page.generated_cluster import GeneratedCluster
from tests.kit.page.page_world import PASSWORD, USER
from tests.kit.page.served_page import served

_SIZES = ((6, 12), (200, 1_000))
_LOADS = 9
_WATCHED_S = 10.0
_FILLED = "performance.getEntriesByName('filled')"
_FETCHED = """(() => {
  const kinds = ["navigation", "resource"];
  const all = kinds.flatMap((kind) => performance.getEntriesByType(kind));
  return [all.length, all.reduce((sum, one) => sum + one.transferSize, 0)];
})()"""


def main() -> int:
    """Two sizes of made-up clusters, each opened by a browser with an empty cache."""
    parser = argparse.ArgumentParser(prog="bench.page.drawing", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="write to bench/results/ too")
    keep = parser.parse_args().keep
    program = shutil.which("chromium")
    if program is None:
        print("this needs Chromium: apt-get install chromium", file=sys.stderr)
        return 1
    report = BenchReport("The page in a browser", "python -m bench.page.drawing")
    report.add(f"Load average before: {load_average()}. Server and browser share the cores.\n")
    report.add("| GPUs, functions | drawn after, median (most) | requests, bytes | main thread |")
    report.add("| --- | ---: | ---: | ---: |")
    with browser(Path(program)) as chromium:
        for gpus, functions in _SIZES:
            with served(GeneratedCluster(gpus, functions), pace=PagePace()) as url:
                report.add(f"| {gpus}, {functions:,} | {_measured(chromium, url)} |")
    if keep:
        print(f"\n{report.keep('page-load')}")
    return 0


def _measured(chromium: Browser, url: str) -> str:
    taken_ms: list[float] = []
    for _ in range(_LOADS):
        with chromium.page(credentials=(USER, PASSWORD)) as page:
            page.open(url)  # shows the password
            page.ask("Network.setCacheDisabled", cacheDisabled=True)
            page.open(url, known=True)
            page.until(f"{_FILLED}.length > 0")
            taken_ms.append(page.run(f"{_FILLED}[0].startTime"))
    with chromium.page(credentials=(USER, PASSWORD)) as page:
        page.open(url)
        page.until(f"{_FILLED}.length > 0")
        count, size_bytes = page.run(_FETCHED)
        busy = _busy(page)
    drawn = f"{median(taken_ms):.0f} ms ({max(taken_ms):.0f})"
    return f"{drawn} | {count}, {size_bytes / 1000:.0f} kB | {busy:.1%}"


def _busy(page: Page) -> float:
    """The browser's main thread while the page is watched, as a share of a core."""
    page.ask("Performance.enable")
    before_s = _task_s(page)
    time.sleep(_WATCHED_S)
    return (_task_s(page) - before_s) / _WATCHED_S


def _task_s(page: Page) -> float:
    metrics = page.ask("Performance.getMetrics")["metrics"]
    found: float = next(one["value"] for one in metrics if one["name"] == "TaskDuration")
    return found


if __name__ == "__main__":
    sys.exit(main())
