"""Generated parts of pages that are otherwise written by hand, between two comments each."""

from collections.abc import Mapping


def with_blocks(page: str, blocks: Mapping[str, str]) -> str:
    """The page with its generated parts replaced; ValueError if it has no place for one."""
    for name, content in blocks.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
        before, begun, rest = page.partition(begin)
        _, ended, after = rest.partition(end)
        if not (begun and ended):
            raise ValueError(f"the page has no place for {name}")
        page = f"{before}{begin}{content.rstrip()}\n{end}{after}"
    return page


def page_of_blocks(title: str, blocks: Mapping[str, str]) -> str:
    """A page of the generated parts alone, each under its name."""
    sections = (
        f"## {name}\n\n<!-- begin {name} -->\n{content.rstrip()}\n<!-- end {name} -->\n"
        for name, content in blocks.items()
    )
    return "\n".join((f"# {title}\n", *sections))
