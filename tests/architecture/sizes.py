"""`make sizes`: how large each package is, beside what it may be."""

import sys
from pathlib import Path
from typing import NamedTuple

from tests.architecture.sources import facts
from tests.kit.places import ROOT

# Lines of Python; the packages' budgets are guides, the product's is the bar.
BUDGETS = {
    "common": 2_600,
    "cache_manager": 1_600,
    "scheduler": 19_000,
    "gpu_manager": 28_000,
    "torch_shim": 15_000,
    "gateway_ext": 23_000,
    "gpufaas": 7_500,
}
OUTSIDE = ("research", "bench", "hunt", "compat", "tests", "deploy")


class Size(NamedTuple):
    """One package; its depth is that of its deepest folder below it."""

    lines: int
    files: int
    folders: int
    depth: int


PRODUCT = Size(lines=102_000, files=620, folders=90, depth=3)


def size_of(package: str) -> Size:
    """Count a package's Python files."""
    files = sorted((ROOT / package).rglob("*.py"))
    folders = {path.parent for path in files}
    depth = max((len(folder.relative_to(ROOT / package).parts) for folder in folders), default=0)
    return Size(sum(facts(path).lines for path in files), len(files), len(folders), depth)


def together(sizes: list[Size]) -> Size:
    """Add packages up."""
    lines, files, folders, depths = zip(*sizes, strict=True)
    return Size(sum(lines), sum(files), sum(folders), max(depths))


def main() -> None:
    """Print the table."""
    sizes = {package: size_of(package) for package in BUDGETS}
    rows = [_row(package, size, f"{BUDGETS[package]:,}") for package, size in sizes.items()]
    bar = f"{PRODUCT.lines:,} / {PRODUCT.files} / {PRODUCT.folders} / {PRODUCT.depth}"
    rows.append(_row("product", together(list(sizes.values())), bar))
    rows += [_row(name, size_of(name), "") for name in OUTSIDE if Path(ROOT / name).is_dir()]
    head = f"{'':14}{'lines':>9}{'files':>7}{'folders':>9}{'depth':>7}  budget"
    sys.stdout.write("\n".join([head, *rows, ""]))


def _row(name: str, size: Size, budget: str) -> str:
    counts = f"{size.lines:>9,}{size.files:>7,}{size.folders:>9}{size.depth:>7}"
    return f"{name:14}{counts}  {budget}".rstrip()


if __name__ == "__main__":
    main()
