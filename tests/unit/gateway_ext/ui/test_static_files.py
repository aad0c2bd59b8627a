"""Rules for the page's own files, as nothing builds or lints them."""

import re

from gateway_ext.ui.routes import PAGE, STATIC

MOST_LINES = 400
MODULES = sorted(path.name for path in STATIC.glob("*.js"))
SHEETS = sorted(path.name for path in STATIC.glob("*.css"))
INDEX = (STATIC / PAGE).read_text()


def code_of(name: str) -> str:
    """A module without its comments."""
    text = (STATIC / name).read_text()
    return re.sub(r"/\*.*?\*/|^\s*//[^\n]*$", "", text, flags=re.DOTALL | re.MULTILINE)


def test_files_are_no_longer_than_they_may_be() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in STATIC.iterdir()}

    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_first_line_of_a_file_describes_it() -> None:
    firsts = {name: (STATIC / name).read_text().splitlines()[0] for name in [*MODULES, *SHEETS]}
    wrong = [
        (name, first)
        for name, first in firsts.items()
        if not re.match(r"// \w.*[^,]$" if name.endswith(".js") else r"/\* \w.*\. \*/$", first)
    ]

    assert MODULES
    assert SHEETS
    assert wrong == []


def test_modules_put_nothing_into_the_page_that_is_not_text() -> None:
    unsafe = re.compile(
        r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|DOMParser|eval|Function\(|document\.write"
        r"|javascript:|setHTMLUnsafe|srcdoc)"
    )

    assert [(name, use) for name in MODULES for use in unsafe.findall(code_of(name))] == []


def test_files_name_nothing_that_lies_elsewhere() -> None:
    elsewhere = re.compile(r"(?:https?:)?//[\w.-]+\.\w|@import")
    wrong = []
    for name in [*MODULES, *SHEETS, PAGE]:
        text = (STATIC / name).read_text().replace("http://www.w3.org/2000/svg", "")
        wrong += [(name, place) for place in elsewhere.findall(re.sub(r"// .*", "", text))]

    assert wrong == []


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
