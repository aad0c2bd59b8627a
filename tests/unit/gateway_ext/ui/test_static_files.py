"""Rules for the page's own files, as nothing builds or lints them."""

import re
from pathlib import Path

import pytest

from gateway_ext.ui.static_files import PAGE, STATIC, StaticFiles

MOST_LINES = 400
MODULES = sorted(path.name for path in STATIC.glob("*.js"))
SHEETS = sorted(path.name for path in STATIC.glob("*.css"))
INDEX = (STATIC / PAGE).read_text()


def code_of(name: str) -> str:
    """A module without its comments."""
    text = (STATIC / name).read_text()
    return re.sub(r"/\*.*?\*/|^\s*//[^\n]*$", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", sorted(STATIC.iterdir()), ids=lambda path: path.name)
def test_file_is_served_and_no_longer_than_others_may_be(path: Path) -> None:
    assert StaticFiles().get(path.name) is not None
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", [*MODULES, *SHEETS])
def test_first_line_of_a_file_describes_it(name: str) -> None:
    first = (STATIC / name).read_text().splitlines()[0]
    assert re.match(r"// \w.*[^,]$" if name.endswith(".js") else r"/\* \w.*\. \*/$", first), first


@pytest.mark.parametrize("name", MODULES)
def test_module_puts_nothing_into_the_page_that_is_not_text(name: str) -> None:
    found = re.findall(
        r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|DOMParser|eval|Function\(|document\.write"
        r"|javascript:|setHTMLUnsafe|srcdoc)",
        code_of(name),
    )
    assert found == []


@pytest.mark.parametrize("name", [*MODULES, *SHEETS, PAGE])
def test_file_names_nothing_that_lies_elsewhere(name: str) -> None:
    text = (STATIC / name).read_text().replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"(?:https?:)?//[\w.-]+\.\w|@import", re.sub(r"// .*", "", text)) == []


def test_page_loads_every_file_at_once_when_it_is_opened() -> None:
    """A module that is only found inside another one costs a round trip more."""
    preloaded = re.findall(r'rel="modulepreload" href="static/(.*?)"', INDEX)
    assert sorted([*preloaded, "main.js"]) == MODULES
    assert sorted(re.findall(r'rel="stylesheet" href="static/(.*?)"', INDEX)) == SHEETS


def test_page_has_nothing_inline_as_its_policy_forbids_it() -> None:
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", INDEX) == []


def test_every_element_that_a_module_asks_for_is_there() -> None:
    asked = {
        found for name in MODULES for found in re.findall(r'byId\("([\w-]+)"\)', code_of(name))
    }
    assert asked
    assert asked - set(re.findall(r'\bid="([\w-]+)"', INDEX)) == set()
