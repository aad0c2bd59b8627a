"""What the tests of the page do there: press a button by its words, choose a policy."""

import json

from tests.kit.page.browser import Page

FILLED = "document.getElementById('main')?.dataset.filled === 'yes'"
LIVE = "document.getElementById('live').dataset.live === 'live'"
IS_OPEN = "document.querySelector('dialog[open]') !== null"
IS_CLOSED = "document.querySelector('dialog[open]') === null"
FOCUS = "document.activeElement"
_MOST_TABS = 120


def press(page: Page, label: str, within: str = "dialog[open]") -> None:
    """Click the button that says so, as soon as it can be pressed."""
    page.until(f"""(() => {{
        const buttons = [...document.querySelectorAll({json.dumps(within + " button")})];
        const found = buttons.find((one) => one.textContent === {json.dumps(label)});
        if (found === undefined || found.disabled) return false;
        document.querySelector("[data-pressed]")?.removeAttribute("data-pressed");
        found.dataset.pressed = "";
        return true;
    }})()""")
    page.click("[data-pressed]")


def choose_policy(page: Page, name: str) -> None:
    """Open the form, and choose this policy there."""
    page.click("#policy")
    page.until(IS_OPEN)
    assert page.run(f"{FOCUS}.id") == "policy-name"
    page.run(f"""(() => {{
        const select = document.getElementById("policy-name");
        select.value = {json.dumps(name)};
        select.dispatchEvent(new Event("change", {{ bubbles: true }}));
    }})()""")


def confirm_policy(page: Page) -> None:
    """Both presses that it takes."""
    press(page, "Decide by it")
    press(page, "Press once more: from now on")
    page.until(IS_CLOSED)


def tab_to(page: Page, selector: str) -> int:
    """Press the tab key until that has the focus; how often."""
    for count in range(1, _MOST_TABS):
        page.press("Tab")
        if page.run(f"{FOCUS}?.matches({json.dumps(selector)}) ?? false"):
            return count
    raise AssertionError(f"{selector} is not reached: {page.run(FOCUS + '?.outerHTML')}")
