"""Who may use how much of a GPU: grants, limits, what was measured, what others take."""

from hypothesis import given
from hypothesis import strategies as st

from gpu_manager.node.ledger import Account, Ledger


def granted(*accounts: Account) -> list[int]:
    return [account.granted_bytes for account in accounts]


def test_model_is_admitted_only_when_it_fits() -> None:
    bert, vgg = Account(), Account()
    ledger = Ledger(1000)
    assert ledger.grow(bert, 600) == 0
    assert ledger.grow(vgg, 500) == 100
    assert ledger.free_bytes == 400
    assert ledger.grow(vgg, 400) == 0
    assert granted(bert, vgg) == [600, 400]


def test_model_ever_fits_when_it_would_fit_alone() -> None:
    bert = Account()
    ledger = Ledger(1000)
    ledger.grow(bert, 900)
    ledger.set_aside(100)
    assert ledger.ever_fits(900)
    assert not ledger.ever_fits(901)


def test_grant_grows_when_there_is_room_and_stays_when_there_is_none() -> None:
    bert, vgg = Account(), Account()
    ledger = Ledger(1000)
    ledger.grow(bert, 300)
    ledger.grow(vgg, 500)
    assert ledger.grow(bert, 450) == 0
    assert ledger.grow(bert, 600) == 100
    assert ledger.grow(bert, 10) == 0
    assert granted(bert, vgg) == [450, 500]
    ledger.release(vgg)
    assert ledger.grow(bert, 600) == 0


def test_grant_becomes_what_was_measured_when_the_model_has_run() -> None:
    bert = Account()
    ledger = Ledger(1000, context_bytes=50)
    ledger.grow(bert, 600)
    assert ledger.note_loaded(bert, 200) == 0
    assert granted(bert) == [600]
    assert ledger.note_ran(bert, 300) == 0
    assert granted(bert) == [300]
    assert ledger.note_ran(bert, 900) == 0
    assert ledger.note_ran(bert, 250) == 0
    assert granted(bert) == [900]
    assert bert.measured_bytes == 900


def test_grant_grows_when_loading_took_more_than_was_believed() -> None:
    bert = Account()
    ledger = Ledger(1000)
    ledger.grow(bert, 100)
    assert ledger.note_loaded(bert, 250) == 0
    assert granted(bert) == [250]


def test_shortage_is_told_when_a_run_took_what_others_were_granted_since() -> None:
    bert, vgg = Account(), Account()
    ledger = Ledger(1000)
    ledger.grow(bert, 300)
    ledger.grow(vgg, 600)
    assert ledger.note_ran(bert, 450) == 50
    assert granted(bert, vgg) == [300, 600]


def test_memory_set_aside_is_nobodys_until_it_is_given_back() -> None:
    bert = Account()
    ledger = Ledger(1000)
    ledger.grow(bert, 700)
    assert ledger.set_aside(400) == 100
    assert ledger.set_aside(300) == 0
    assert ledger.free_bytes == 0
    assert ledger.set_aside(100) == 0
    assert ledger.free_bytes == 200


def test_memory_of_other_programs_is_withheld_when_the_device_says_so() -> None:
    bert = Account()
    ledger = Ledger(1000)
    ledger.grow(bert, 300)
    assert ledger.reconcile(used_bytes=500, device_bytes=1000) == 200
    assert ledger.free_bytes == 500
    assert ledger.reconcile(used_bytes=250, device_bytes=1000) == 0
    assert ledger.free_bytes == 700


def test_memory_of_other_programs_counts_also_where_it_was_granted() -> None:
    bert = Account()
    ledger = Ledger(1000)
    ledger.grow(bert, 800)
    assert ledger.reconcile(used_bytes=700, device_bytes=1000, ours_bytes=400) == 300
    assert ledger.free_bytes == 0


def test_others_are_ignored_when_they_stay_within_the_part_that_is_not_ours() -> None:
    ledger = Ledger(1000)
    assert ledger.reconcile(used_bytes=4000, device_bytes=5000) == 0
    assert ledger.reconcile(used_bytes=4100, device_bytes=5000) == 100


def test_context_counts_in_the_place_of_the_model_that_left_it() -> None:
    bert, vgg = Account(), Account()
    ledger, context = Ledger(1000, context_bytes=70), Account()
    ledger.grow(bert, 600)
    ledger.grow(vgg, 300)

    assert ledger.move(bert, context, 80) == 0

    assert granted(bert, vgg, context) == [0, 300, 80]
    assert (ledger.granted_bytes, ledger.free_bytes) == (380, 620)
    for _ in range(2):
        ledger.release(context)
        assert ledger.granted_bytes == 300


def test_context_that_does_not_fit_leaves_everything_as_it_was() -> None:
    bert, vgg = Account(), Account()
    ledger, context = Ledger(1000), Account()
    ledger.grow(bert, 100)
    ledger.grow(vgg, 800)

    assert ledger.move(bert, context, 250) == 50

    assert granted(bert, vgg, context) == [100, 800, 0]
    assert ledger.move(bert, context, 200) == 0
    assert ledger.free_bytes == 0


SIZES = st.integers(0, 1200)
WHICH = st.integers(0, 2)
STEPS = st.one_of(
    st.tuples(st.just("grow"), WHICH, SIZES),
    st.tuples(st.just("loaded"), WHICH, SIZES),
    st.tuples(st.just("ran"), WHICH, SIZES),
    st.tuples(st.just("release"), WHICH, st.just(0)),
    st.tuples(st.just("leave"), WHICH, SIZES),
    st.tuples(st.just("enter"), WHICH, st.just(0)),
    st.tuples(st.just("end"), WHICH, st.just(0)),
    st.tuples(st.just("set_aside"), WHICH, SIZES),
    st.tuples(st.just("reconcile"), WHICH, SIZES),
)


def step(ledger: Ledger, what: str, model: Account, context: Account, size: int) -> int:
    """What the ledger says is lacking."""
    short_bytes = 0
    if what == "grow":
        short_bytes = ledger.grow(model, size)
    elif what == "loaded":
        short_bytes = ledger.note_loaded(model, size)
    elif what == "ran":
        short_bytes = ledger.note_ran(model, size)
    elif what == "release":
        ledger.release(model)
    elif what == "leave":
        ledger.release(context)  # the former one ends first
        short_bytes = ledger.move(model, context, size)
    elif what == "enter":
        ledger.release(model)
        assert ledger.move(context, model, context.granted_bytes) == 0
    elif what == "end":
        ledger.release(context)
    elif what == "set_aside":
        short_bytes = ledger.set_aside(size)
    else:
        ledger.reconcile(size, 1000, ours_bytes=min(size, ledger.granted_bytes))
    return short_bytes


@given(st.lists(STEPS, max_size=40))
def test_grants_never_exceed_the_capacity_whatever_happens(
    steps: list[tuple[str, int, int]],
) -> None:
    ledger, models, contexts = Ledger(1000), *([Account() for _ in range(3)] for _ in range(2))
    for what, which, size in steps:
        free_before, granted_before = ledger.free_bytes, ledger.granted_bytes
        short_bytes = step(ledger, what, models[which], contexts[which], size)
        assert sum(granted(*models, *contexts)) <= ledger.granted_bytes <= 1000
        assert ledger.free_bytes >= 0
        if what == "reconcile":
            continue
        assert ledger.free_bytes + ledger.granted_bytes == free_before + granted_before
        if what in {"grow", "set_aside"} and short_bytes:
            assert ledger.granted_bytes == granted_before
    for account in (*models, *contexts):
        ledger.release(account)
    ledger.set_aside(0)
    ledger.reconcile(0, 1000)
    assert ledger.free_bytes == 1000
