"""What a person sees and does on the page of a cluster that is made up."""

from urllib.parse import quote

import pytest

from gpufaas.stack.held_ports import HeldPort
from tests.e2e.page.doing import (
    FILLED,
    IS_CLOSED,
    IS_OPEN,
    LIVE,
    choose_policy,
    press,
)
from tests.e2e.page.opener import Opener
from tests.kit.page.browser import Browser
from tests.kit.page.generated_cluster import GeneratedCluster, empty
from tests.kit.page.generated_parts import GeneratedGpu, GeneratedRun
from tests.kit.page.page_world import PASSWORD, USER
from tests.kit.page.served_page import calm, served

DIALOG = "document.querySelector('dialog[open]')"


def gpu_with_models(cluster: GeneratedCluster) -> tuple[GeneratedGpu, str]:
    """A GPU of it, and a model that it has."""
    gpu = next(gpu for gpu in cluster.gpus.values() if gpu.residents)
    return gpu, next(iter(gpu.residents))


def leave(gpu: GeneratedGpu, model: str) -> None:
    """Have a model gone, while a thread that serves the page may be counting the GPU's models."""
    gpu.residents = {name: held for name, held in gpu.residents.items() if name != model}


def only_copy(cluster: GeneratedCluster) -> tuple[GeneratedGpu, str]:
    """A model that no other GPU has."""
    for gpu in cluster.gpus.values():
        others = [other.residents for other in cluster.gpus.values() if other is not gpu]
        for model in gpu.residents:
            if not any(model in residents for residents in others):
                return gpu, model
    raise AssertionError("every model has a copy")


def block(gpu: GeneratedGpu, model: str) -> str:
    return f'.gpu[data-gpu="{gpu.id}"] .block[data-model="{model}"]'


@pytest.mark.parametrize("password", ["wrong", ""])
def test_page_is_refused_when_the_password_is_wrong(
    chromium: Browser, url: str, password: str
) -> None:
    with chromium.page(credentials=(USER, password)) as page:
        page.open(url)
        assert page.status == 401
        assert page.run("document.getElementById('main')") is None


def test_page_works_when_its_url_has_the_password(chromium: Browser, url: str) -> None:
    """Browsers fetch no URL that has a password, and relative URLs inherit it."""
    with chromium.page() as page:
        page.open(url.replace("//", f"//{USER}:{quote(PASSWORD)}@"))
        page.until(f"{FILLED} && {LIVE}")
        page.click("#pause")  # a new decision would move the others under the mouse
        page.click("button.decision")
        page.until(f"{DIALOG}?.innerText.includes('Estimated finish') ?? false")
        assert page.trouble.console == []
        assert page.trouble.failed == []


def test_blocks_are_to_scale_when_a_cluster_is_shown(
    opened: Opener, url: str, cluster: GeneratedCluster
) -> None:
    page = opened(url)
    assert page.run("document.querySelectorAll('.gpu').length") == len(cluster.gpus)
    for gpu in cluster.gpus.values():
        bar_px = page.run(f"document.querySelector('.gpu[data-gpu=\"{gpu.id}\"] .bar').clientWidth")
        for model, held in gpu.residents.items():
            seen = f"document.querySelector('{block(gpu, model)}').getBoundingClientRect().width"
            scale_px = bar_px * held.function.bytes / gpu.bytes
            assert page.run(seen) == pytest.approx(scale_px, abs=3), (gpu.id, model)
    assert "8 functions" in page.text("#functions")
    assert "No request waits" in page.text("#queue")
    assert page.text("#policy") == "Policy lalbo3"


def test_change_is_seen_when_nobody_reloads(
    opened: Opener, url: str, cluster: GeneratedCluster
) -> None:
    page = opened(url)
    gpu, model = gpu_with_models(cluster)
    gpu.residents[model].pinned = True
    page.until(f"document.querySelector('{block(gpu, model)}').classList.contains('pinned')")
    leave(gpu, model)
    page.until(f"document.querySelector('{block(gpu, model)}') === null")
    gpu.state = "silent"
    page.until(f"document.querySelector('.gpu[data-gpu=\"{gpu.id}\"]').dataset.state === 'silent'")
    page.until("document.getElementById('alerts').innerText.includes('is silent')")


def test_gpu_and_function_are_gone_when_they_have_left(
    opened: Opener, url: str, cluster: GeneratedCluster
) -> None:
    page = opened(url)
    first, last = next(iter(cluster.gpus)), next(reversed(cluster.gpus))
    function = cluster.functions.pop()
    left = cluster.gpus[first]
    # New tables each time: a thread that serves the page may be counting those of before.
    cluster.gpus = {name: gpu for name, gpu in cluster.gpus.items() if name != first}
    page.until(f"document.querySelector('.gpu[data-gpu=\"{first}\"]') === null")
    page.until(f"document.querySelector('[data-id^=\"{function.name}.\"]') === null")
    assert "7 functions" in page.text("#functions-summary")
    cluster.gpus = {**cluster.gpus, first: left}  # it joins again, behind the others
    page.until(f"document.querySelector('.gpu[data-gpu=\"{first}\"]') !== null")
    shown = page.run("[...document.querySelectorAll('.gpu')].map((one) => one.dataset.gpu)")
    assert (shown[0], shown[-1]) == (first, last)


def test_policy_is_another_when_it_was_chosen_and_confirmed(
    opened: Opener, url: str, cluster: GeneratedCluster
) -> None:
    page = opened(url)
    choose_policy(page, "netgain")
    page.click("#parameter-patience")
    page.run("document.getElementById('parameter-patience').select()")
    page.type("7.5")
    press(page, "Decide by it")
    assert cluster.policy["name"] == "lalbo3"  # it is asked whether that is meant
    press(page, "Press once more: from now on")
    page.until("document.getElementById('policy').textContent === 'Policy netgain'")
    assert cluster.policy == {"name": "netgain", "parameters": {"patience": 7.5}}
    page.until(IS_CLOSED)
    page.until("document.activeElement.id === 'policy'")


def test_explanation_is_told_when_a_decision_is_opened(
    opened: Opener, url: str, cluster: GeneratedCluster
) -> None:
    page = opened(url)
    newest = max(cluster.decisions.values(), key=lambda one: one["number"])
    page.click(f'[data-request="{newest["request"]}"]')
    page.until(IS_OPEN)
    text = page.text("dialog[open]")
    for words in (newest["request"], newest["rule"], "Estimated finish", "Measured", "host"):
        if words != "host" or not newest["hit"]:
            assert words in text, text
    assert f"Placed on {newest['gpu']}, {newest['gpu']}.1," in text
    assert "Configured for a batch of 2, on 3 vCPUs and 2 slots." in text
    assert newest["gpu"] in page.text("dialog[open] tr.chosen")
    rows = page.run("document.querySelectorAll('dialog[open] .candidates tbody tr').length")
    assert rows == len(cluster.gpus)
    weighed = page.text("dialog[open] .weighed")
    assert "waiting" in weighed
    assert newest["gpu"] in weighed


def test_lease_tells_its_slots_and_configuration_when_its_gpu_is_opened(
    opened: Opener, url: str, cluster: GeneratedCluster
) -> None:
    gpu, _ = gpu_with_models(cluster)
    (function, *_) = (held.function for held in gpu.residents.values())
    gpu.running = GeneratedRun("r", function, 0.0, 0.0, 1e12, 0.0, True, 1)
    page = opened(url)
    page.click(f'.gpu[data-gpu="{gpu.id}"] .gpu-name')
    page.until(IS_OPEN)
    words = "a batch of 2 on 3 vCPUs and 2 slots"
    page.until(f"document.querySelector('dialog[open]').textContent.includes('{words}')")


def test_model_is_pinned_evicted_and_brought_back_when_ordered(
    opened: Opener, url: str, cluster: GeneratedCluster
) -> None:
    page = opened(url)
    gpu, model = gpu_with_models(cluster)
    where = f"document.querySelector('{block(gpu, model)}')"
    page.click(block(gpu, model))
    press(page, "Pin here")
    page.until(f"{IS_CLOSED} && {where}.classList.contains('pinned')")
    page.click(block(gpu, model))
    press(page, "Unpin")
    page.until(f"{IS_CLOSED} && !{where}.classList.contains('pinned')")
    page.click(block(gpu, model))
    press(page, "Evict from here")
    assert model in gpu.residents
    press(page, "Evict: press once more")
    page.until(f"{IS_CLOSED} && {where} === null")
    assert cluster.ordered == [(model, verb, gpu.id) for verb in ("pin", "unpin", "evict")]
    page.click(f'.gpu[data-gpu="{gpu.id}"] .gpu-name')
    page.until(IS_OPEN)
    page.run(f"document.getElementById('load-model').value = {model!r}")
    press(page, "Prefetch")
    page.until(f"{IS_CLOSED} && {where} !== null")
    assert cluster.ordered[-1] == (model, "prefetch", gpu.id)


def test_model_is_copied_to_another_gpu_when_its_block_was_asked_for_it(
    opened: Opener, url: str, cluster: GeneratedCluster
) -> None:
    page = opened(url)
    gpu, model = only_copy(cluster)
    page.click(block(gpu, model))
    page.until(IS_OPEN)
    target = page.run("document.getElementById('prefetch-gpu').options[1].value")
    page.run(f"document.getElementById('prefetch-gpu').value = {target!r}")
    press(page, "Prefetch")
    page.until(
        f"{IS_CLOSED} && document.querySelector('{block(cluster.gpus[target], model)}') !== null"
    )


def test_refusal_is_told_in_the_dialog_when_an_order_cannot_be_carried_out(
    chromium: Browser, url: str, cluster: GeneratedCluster
) -> None:
    with chromium.page(credentials=(USER, PASSWORD)) as page:
        page.open(url)
        page.until(FILLED)
        gpu, model = gpu_with_models(cluster)
        page.click("#pause")  # so that it does not learn what happens meanwhile
        page.click(block(gpu, model))
        page.until(IS_OPEN)
        leave(gpu, model)
        press(page, "Pin here")
        page.until(f"{DIALOG}.querySelector('[role=alert]:not([hidden])') !== null")
        assert "is on no GPU" in page.text("dialog[open] [role=alert]")
        assert page.trouble.failed == [
            f"{url}models/{model}/pin: 409"
        ]  # and nothing else went wrong


def test_dead_letters_are_replayed_and_deleted_when_asked(
    opened: Opener, url: str, cluster: GeneratedCluster
) -> None:
    page = opened(url)
    first, second, third = cluster.letters
    press(page, "Replay", f'[data-letter="{first}"]')
    page.until(f"document.querySelector('[data-letter=\"{first}\"]') === null")
    press(page, "Delete", f'[data-letter="{second}"]')
    press(page, "Delete: press once more", f'[data-letter="{second}"]')
    page.until("document.querySelectorAll('.letter').length === 1")
    assert list(cluster.letters) == [third]
    assert cluster.counts["requests"] > 0


def test_functions_are_found_and_sorted_when_asked(opened: Opener, url: str) -> None:
    page = opened(url)
    page.click("#functions-find")
    page.type("resn")
    page.until("document.querySelectorAll('.window-body .row').length === 1")
    assert "1 of 8 functions" in page.text("#functions-summary")
    page.run("document.getElementById('functions-find').select()")
    page.press("Escape")  # empties a search field
    page.until("document.querySelectorAll('.window-body .row').length === 8")
    page.click(".window .of-name button")
    names = page.run(
        "[...document.querySelectorAll('.window-body .row')]"
        ".map((row) => [row.ariaRowIndex, row.dataset.id])"
    )
    in_order = [name for _, name in sorted((int(index), name) for index, name in names)]
    assert in_order == sorted(in_order)
    assert page.run("document.querySelector('.window .of-name').ariaSort") == "ascending"


def test_what_to_type_next_is_told_when_there_is_nothing(opened: Opener) -> None:
    with opened.served(empty()) as url:
        page = opened(url)
        said = page.text()
        for words in ("gpufaas gpu-manager", "faas-cli deploy", "curl http", "No request waits"):
            assert words in said, said


def test_names_stay_text_when_they_look_like_markup(opened: Opener) -> None:
    cluster = calm(2, 3)
    evil = '<img src=x onerror="document.title=1">'
    for function in cluster.functions:
        object.__setattr__(function, "name", evil)
    cluster.called[evil] = cluster.called[next(iter(cluster.called))]
    with opened.served(cluster) as url:
        page = opened(url)
        page.click(".block")
        page.until(IS_OPEN)
        assert evil in page.text("dialog[open] h2")
        assert page.run("document.querySelectorAll('img').length") == 1  # our own
        assert page.run("document.title") == "gpufaas"


def test_page_says_that_it_is_old_and_recovers_when_the_gateway_was_away(
    chromium: Browser, cluster: GeneratedCluster
) -> None:
    with HeldPort() as held, chromium.page(credentials=(USER, PASSWORD)) as page:
        with served(cluster, port=held.number) as url:
            page.open(url)
            page.until(f"{FILLED} && {LIVE}")
        page.until("document.getElementById('live').dataset.live === 'lost'")
        assert "lost" in page.text("#stale") or "cannot be reached" in page.text("#stale")
        assert page.run("Number(getComputedStyle(document.getElementById('main')).opacity)") < 1
        gpu, model = gpu_with_models(cluster)
        gpu.residents[model].pinned = True
        with served(cluster, port=held.number):
            page.until(LIVE)
            page.until(f"document.querySelector('{block(gpu, model)}').matches('.pinned')")
            assert page.run("document.getElementById('stale').hidden") is True


def test_nothing_moves_when_it_is_paused(
    opened: Opener, url: str, cluster: GeneratedCluster
) -> None:
    page = opened(url)
    gpu, model = gpu_with_models(cluster)
    page.click("#pause")
    page.until("document.getElementById('live').dataset.live === 'paused'")
    gpu.residents[model].pinned = True
    page.run("new Promise((done) => setTimeout(done, 500))")
    seen = f"document.querySelector('{block(gpu, model)}').matches('.pinned')"
    assert page.run(seen) is False
    page.click("#pause")
    page.until(f"{LIVE} && {seen}")


def test_bill_is_told_when_a_function_is_opened(opened: Opener, url: str) -> None:
    page = opened(url)
    page.click(".window-body .row")
    page.until("document.querySelector('dialog[open]') !== null")
    text = page.text("dialog[open]")
    assert "GPU memory" in text
    assert "EUR" in text
