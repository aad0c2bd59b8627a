"""What finished requests teach about the calls of those that come."""

from torch_shim.leases.leasing import ENOUGH, Habits


def after(*calls: int, models: str = "a") -> Habits:
    """What requests have taught that made so many calls each."""
    habits = Habits()
    for made in calls:
        habits.finished(models, made)
    return habits


def test_nothing_is_sure_when_four_requests_were_alike() -> None:
    assert after(2, 2, 2, 2).calls("a") is None


def test_number_of_calls_is_sure_when_five_requests_were_alike() -> None:
    assert after(2, 2, 2, 2, 2).calls("a") == 2


def test_nothing_is_sure_when_the_latest_of_them_differed() -> None:
    habits = after(2, 2, 2, 2, 2, 3)
    assert habits.calls("a") is None
    for _ in range(ENOUGH):
        assert habits.calls("a") is None
        habits.finished("a", 2)
    assert habits.calls("a") == 2


def test_requests_teach_nothing_of_those_that_use_other_models() -> None:
    habits = after(1, 1, 1, 1, 1, models="ab")
    assert habits.calls("a") is None
    assert habits.calls("ba") == 1


def test_more_requests_have_to_be_alike_when_a_guess_was_wrong() -> None:
    habits = after(*[1] * ENOUGH)
    habits.note_wrong_guess("a")
    for _ in range(2 * ENOUGH):
        assert habits.calls("a") is None
        habits.finished("a", 1)
    assert habits.calls("a") == 1


def test_patience_has_an_end_when_guesses_were_wrong_again_and_again() -> None:
    habits = Habits()
    for _ in range(20):
        habits.note_wrong_guess("a")
    for _ in range(80):
        assert habits.calls("a") is None
        habits.finished("a", 1)
    assert habits.calls("a") == 1


def test_latest_habits_are_kept_when_there_are_many() -> None:
    habits = after(*[1] * ENOUGH)
    for number in range(300):
        habits.finished([str(number)], 1)
        habits.finished("b", 1)
    assert habits.calls("a") is None
    assert habits.calls("b") == 1
