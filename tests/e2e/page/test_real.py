"""The page of a real `gpufaas up`: real calls, real models, and orders that are carried out."""

import json

from tests.e2e.page.doing import IS_CLOSED, IS_OPEN, choose_policy, confirm_policy, press
from tests.e2e.page.opener import Opener
from tests.kit.page.browser import Page
from tests.kit.stacks.handlers import ON_GPU, write
from tests.kit.stacks.load import Asked, load, warm
from tests.kit.stacks.stack import Rest, Stack, leases
from tests.kit.waiting import wait_until

NAME = "watched"
HALF = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x):
        return torch.from_numpy(self.layer(x).cpu().numpy().clip(0))
model = Net().eval().cuda()
def handle(event, context):
    with torch.no_grad():
        model(torch.ones(1, 8, device="cuda"))
    return "done"
"""
BLOCK = f".block[aria-label^='{NAME},']"


def residents(up: Stack) -> list[str]:
    """Every model that is on a GPU, as the scheduler says."""
    gpus = up.scheduler.get("/cluster")["gpus"]
    return [one["model"] for gpu in gpus for one in gpu["residents"]]


def test_calls_are_seen_and_orders_carried_out_when_the_stack_is_real(
    opened: Opener, up: Stack, rest: Rest
) -> None:
    rest.deploy(NAME, annotations={**write(up.work, NAME, ON_GPU), "com.gpufaas.enabled": "true"})
    before = up.scheduler.get("/policy")
    page = opened(f"{up.url}/ui/", credentials=("admin", up.password))
    try:
        warm(up, rest, Asked(NAME))
        with load(up.url, [Asked(NAME, pause_s=0.05)]) as calls:
            _calls_are_seen(page)
            _policy_is_switched(page, up)
            _explanation_is_told(page)
            calls.some_more()
        assert calls.failures == []
        _model_is_pinned_and_evicted(page, up)
    finally:
        up.scheduler.put("/policy", before)
        rest.remove(NAME)
    page.until(f"!document.getElementById('functions').innerText.includes('{NAME}')")


def test_work_without_a_gpu_is_told_with_its_line_and_the_templates_state(
    opened: Opener, up: Stack, rest: Rest
) -> None:
    name = "half"
    rest.deploy(name, annotations={**write(up.work, name, HALF), "com.gpufaas.enabled": "true"})
    page = opened(f"{up.url}/ui/", credentials=("admin", up.password))
    row = f"document.querySelector('[data-id=\"{name}.openfaas-fn\"] .cell')"
    try:
        page.until(f"{row} !== null")
        page.run(f"{row}.click()")
        page.until(IS_OPEN)
        page.until("document.querySelector('dialog').innerText.includes('imported, ')")

        def is_told() -> bool:
            assert rest.call(name).text == "done"
            return "NumPy computes on the function's own processor" in page.text("dialog[open]")

        wait_until(is_told, "the line is told", instead=lambda: page.text("dialog[open]"))
        assert "handler.py:8: NumPy" in page.text("dialog[open]")
    finally:
        rest.remove(name)


def _calls_are_seen(page: Page) -> None:
    page.until(f"document.querySelector({json.dumps(BLOCK)}) !== null")
    row = f"document.querySelector('[data-id=\"{NAME}.openfaas-fn\"]')"
    page.until(f"Number({row}?.querySelector('.of-calls').innerText) > 3")
    page.until(f"parseFloat({row}.querySelector('.of-gpu_seconds').innerText) > 0")
    page.until("parseFloat(document.querySelector('.tile .big').textContent) > 0")
    assert "2 GPUs" in page.text("#gpus") or "of 2 busy" in page.text("#gpus")


def _policy_is_switched(page: Page, up: Stack) -> None:
    choose_policy(page, "lb")
    confirm_policy(page)
    page.until("document.getElementById('policy').textContent === 'Policy lb'")
    assert up.scheduler.get("/policy")["policy"] == "lb"


def _explanation_is_told(page: Page) -> None:
    page.until(f"document.querySelector('.decisions').innerText.includes('{NAME}')")
    page.until("document.querySelector('[data-kind=completed]') !== null")
    page.run("document.querySelector('.decisions [data-kind=completed]').closest('button').click()")
    page.until(IS_OPEN)
    text = page.text("dialog[open]")
    for words in (NAME, "Estimated finish", "Measured", "completed"):
        assert words in text, text
    page.press("Escape")
    page.until(IS_CLOSED)


def _model_is_pinned_and_evicted(page: Page, up: Stack) -> None:
    wait_until(lambda: not leases(up), "nobody has a GPU any more")
    page.until(f"document.querySelector({json.dumps(BLOCK + ':not(.busy)')}) !== null")
    model = page.run(f"document.querySelector({json.dumps(BLOCK)}).dataset.model")
    assert model in residents(up)
    for order, mark in (("Pin here", ".pinned"), ("Unpin", ":not(.pinned)")):
        page.click(BLOCK)
        press(page, order)
        page.until(f"{IS_CLOSED} && document.querySelector({json.dumps(BLOCK + mark)}) !== null")
    count = residents(up).count(model)
    page.click(BLOCK)
    press(page, "Evict from here")
    press(page, "Evict: press once more")
    wait_until(
        lambda: residents(up).count(model) == count - 1,
        "evicted",
        instead=lambda: page.text("dialog[open]"),
        within_s=20,
    )
    page.until(f"document.querySelectorAll({json.dumps(BLOCK)}).length === {count - 1}")
