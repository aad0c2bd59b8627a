"""Who may use how much of a GPU: grants, limits, what was measured, what others take."""

from hypothesis import given
from hypothesis import strategies as st

from cache_manager.model.ids import ModelId
from gpu_manager.node.ledger import Ledger

BERT, VGG, RESNET = ModelId("bert"), ModelId("vgg"), ModelId("resnet")


def test_model_is_admitted_only_when_it_fits() -> None:
    ledger = Ledger(1000)
    assert ledger.admit(BERT, 600) == 0
    assert ledger.admit(VGG, 500) == 100
    assert VGG not in ledger
    assert ledger.free_bytes == 400
    assert ledger.fits(400)
    assert not ledger.fits(401)
    assert ledger.admit(VGG, 400) == 0
    assert ledger.models() == {BERT: 600, VGG: 400}


def test_model_ever_fits_when_it_would_fit_alone() -> None:
    ledger = Ledger(1000)
    ledger.admit(BERT, 900)
    ledger.set_aside(100)
    assert ledger.ever_fits(900)
    assert not ledger.ever_fits(901)


def test_grant_grows_when_there_is_room_and_stays_when_there_is_none() -> None:
    ledger = Ledger(1000)
    ledger.admit(BERT, 300)
    ledger.admit(VGG, 500)
    assert ledger.grow(BERT, 450) == 0
    assert ledger.grow(BERT, 600) == 100
    assert ledger.grow(BERT, 10) == 0
    assert ledger.models() == {BERT: 450, VGG: 500}
    assert ledger.release(VGG) == 500
    assert ledger.grow(BERT, 600) == 0


def test_admitting_again_grows_when_the_model_is_there() -> None:
    ledger = Ledger(1000)
    ledger.admit(BERT, 300)
    assert ledger.admit(BERT, 1200) == 200
    assert ledger.admit(BERT, 800) == 0
    assert ledger.granted_bytes == 800


def test_release_gives_nothing_when_the_model_is_not_there() -> None:
    assert Ledger(1000).release(BERT) == 0


def test_limit_is_the_grant_and_what_nobody_has() -> None:
    ledger = Ledger(1000)
    ledger.admit(BERT, 300)
    ledger.admit(VGG, 500)
    assert ledger.limit_bytes(BERT) == 500
    assert ledger.limit_bytes(VGG) == 700
    ledger.admit(RESNET, 150)
    assert ledger.limit_bytes(BERT) == 350


def test_grant_becomes_what_was_measured_when_the_model_has_run() -> None:
    ledger = Ledger(1000, context_bytes=50)
    ledger.admit(BERT, 600)
    assert ledger.loaded(BERT, 200) == 0
    assert ledger.models() == {BERT: 600}
    assert ledger.ran(BERT, 300) == 0
    assert ledger.models() == {BERT: 300}
    assert ledger.ran(BERT, 900) == 0
    assert ledger.ran(BERT, 250) == 0
    assert ledger.models() == {BERT: 900}
    assert ledger.measured_bytes(BERT) == 900


def test_grant_grows_when_loading_took_more_than_was_believed() -> None:
    ledger = Ledger(1000)
    ledger.admit(BERT, 100)
    assert ledger.loaded(BERT, 250) == 0
    assert ledger.models() == {BERT: 250}


def test_shortage_is_told_when_a_run_took_what_others_were_granted_since() -> None:
    ledger = Ledger(1000)
    ledger.admit(BERT, 300)
    ledger.admit(VGG, 600)
    assert ledger.ran(BERT, 450) == 50
    assert ledger.models() == {BERT: 300, VGG: 600}


def test_memory_set_aside_is_nobodys_until_it_is_given_back() -> None:
    ledger = Ledger(1000)
    ledger.admit(BERT, 700)
    assert ledger.set_aside(400) == 100
    assert ledger.set_aside(300) == 0
    assert ledger.free_bytes == 0
    assert ledger.set_aside(100) == 0
    assert ledger.free_bytes == 200


def test_memory_of_other_programs_is_withheld_when_the_device_says_so() -> None:
    ledger = Ledger(1000)
    ledger.admit(BERT, 300)
    seen = ledger.reconcile(used_bytes=500, device_bytes=1000)
    assert (seen.withheld_bytes, seen.short_bytes) == (200, 0)
    assert ledger.free_bytes == 500
    assert ledger.reconcile(used_bytes=250, device_bytes=1000).withheld_bytes == 0
    assert ledger.free_bytes == 700


def test_shortage_is_told_when_others_use_what_was_granted() -> None:
    ledger = Ledger(1000)
    ledger.admit(BERT, 800)
    seen = ledger.reconcile(used_bytes=700, device_bytes=1000, ours_bytes=400)
    assert (seen.withheld_bytes, seen.short_bytes) == (200, 100)
    assert ledger.free_bytes == 0


def test_others_are_ignored_when_they_stay_within_the_part_that_is_not_ours() -> None:
    ledger = Ledger(1000)
    seen = ledger.reconcile(used_bytes=4000, device_bytes=5000)
    assert (seen.withheld_bytes, seen.short_bytes) == (0, 0)
    assert ledger.reconcile(used_bytes=4100, device_bytes=5000).withheld_bytes == 100


def test_context_counts_in_the_place_of_the_model_that_left_it() -> None:
    ledger = Ledger(1000, context_bytes=70)
    ledger.admit(BERT, 600)
    ledger.admit(VGG, 300)

    assert ledger.of_context("a") == 70  # not measured yet
    assert ledger.leave(BERT, "a", 80) == 0

    assert ledger.models() == {VGG: 300}
    assert ledger.of_context("a") == 80
    assert (ledger.granted_bytes, ledger.free_bytes) == (380, 620)
    assert ledger.limit_bytes(VGG) == 920
    assert ledger.release_context("a") == 80
    assert ledger.release_context("a") == 0
    assert ledger.granted_bytes == 300


def test_context_that_does_not_fit_leaves_everything_as_it_was() -> None:
    ledger = Ledger(1000)
    ledger.admit(BERT, 100)
    ledger.admit(VGG, 800)

    assert ledger.leave(BERT, "a", 250) == 50

    assert ledger.models() == {BERT: 100, VGG: 800}
    assert ledger.leave(BERT, "a", 200) == 0
    assert ledger.free_bytes == 0


def test_contexts_memory_becomes_the_next_models_and_counts_once() -> None:
    ledger = Ledger(1000)
    ledger.admit(BERT, 600)
    ledger.leave(BERT, "a", 100)
    ledger.admit(VGG, 500)

    ledger.enter("a", BERT)

    assert ledger.admit(BERT, 501) == 1
    assert ledger.admit(BERT, 500) == 0
    assert ledger.models() == {BERT: 500, VGG: 500}
    assert ledger.release_context("a") == 0


SIZES = st.integers(0, 1200)
MODELS = st.sampled_from([BERT, VGG, RESNET])
STEPS = st.one_of(
    st.tuples(st.just("admit"), MODELS, SIZES),
    st.tuples(st.just("grow"), MODELS, SIZES),
    st.tuples(st.just("loaded"), MODELS, SIZES),
    st.tuples(st.just("ran"), MODELS, SIZES),
    st.tuples(st.just("release"), MODELS, st.just(0)),
    st.tuples(st.just("leave"), MODELS, SIZES),
    st.tuples(st.just("enter"), MODELS, st.just(0)),
    st.tuples(st.just("release_context"), MODELS, st.just(0)),
    st.tuples(st.just("set_aside"), MODELS, SIZES),
    st.tuples(st.just("reconcile"), MODELS, SIZES),
)


def step(ledger: Ledger, what: str, model: ModelId, size: int) -> int | None:
    """What the ledger says is lacking; None where it says nothing of the kind."""
    if what == "admit":
        return ledger.admit(model, size)
    if what == "set_aside":
        return ledger.set_aside(size)
    if what == "reconcile":
        ledger.reconcile(size, 1000, ours_bytes=min(size, ledger.granted_bytes))
    elif what == "release":
        ledger.release(model)
    elif what == "release_context":
        ledger.release_context(f"of {model}")
    elif what == "enter":
        if model not in ledger and f"of {model}" in ledger.contexts():
            ledger.enter(f"of {model}", model)
    elif model not in ledger:
        return None
    elif what == "leave":
        ledger.release_context(f"of {model}")  # the former one ends first
        return ledger.leave(model, f"of {model}", size)
    elif what == "grow":
        return ledger.grow(model, size)
    elif what == "loaded":
        return ledger.loaded(model, size)
    else:
        return ledger.ran(model, size)
    return None


@given(st.lists(STEPS, max_size=40))
def test_grants_never_exceed_the_capacity_whatever_happens(
    steps: list[tuple[str, ModelId, int]],
) -> None:
    ledger = Ledger(1000)
    for what, model, size in steps:
        free_before, granted_before = ledger.free_bytes, ledger.granted_bytes
        short_bytes = step(ledger, what, model, size)
        kept_bytes = sum(ledger.contexts().values())
        assert sum(ledger.models().values()) + kept_bytes <= ledger.granted_bytes <= 1000
        assert ledger.free_bytes >= 0
        assert ledger.limit_bytes(model) <= 1000 if model in ledger else True
        if what == "reconcile":
            continue
        assert ledger.free_bytes + ledger.granted_bytes == free_before + granted_before
        if what in {"admit", "grow", "set_aside"} and short_bytes:
            assert ledger.granted_bytes == granted_before
    for model in list(ledger.models()):
        ledger.release(model)
    for context in ledger.contexts():
        ledger.release_context(context)
    ledger.set_aside(0)
    ledger.reconcile(0, 1000)
    assert ledger.free_bytes == 1000
