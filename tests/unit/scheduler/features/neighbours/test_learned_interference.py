"""What is learned on a type of GPU is used only while it is better than to expect no slowdown."""

from random import Random

from scheduler.composition import make_core
from scheduler.features.neighbours import Neighbours, mean_of, scaled
from scheduler.model.values import METRICS

ONE = tuple([0.25 for _ in METRICS])
OTHER = tuple([0.75 for _ in METRICS])


def neighbours() -> Neighbours:
    return make_core("lb").layer(Neighbours)


def test_nothing_slows_anything_down_before_enough_was_seen() -> None:
    learned = neighbours()
    assert "any" not in learned.learned
    for _ in range(7):
        learned.observe("any", ONE, [OTHER], 2.0)
    assert learned.predict("any", ONE, [OTHER]) == 1.0
    learned.observe("any", ONE, [OTHER], 2.0)
    assert learned.predict("any", ONE, [OTHER]) > 1.9
    assert learned.predict("any", ONE, []) == 1.0
    assert learned.predict("another", ONE, [OTHER]) == 1.0


def test_noise_around_no_slowdown_is_not_used() -> None:
    learned, random = neighbours(), Random(3)
    for _ in range(64):
        learned.observe("any", ONE, [OTHER], 1.0 + 0.1 * random.choice((-1, 1)))
    assert learned.predict("any", ONE, [OTHER]) == 1.0


def test_what_was_learned_is_given_up_when_it_becomes_wrong() -> None:
    learned, random = neighbours(), Random(4)
    for _ in range(16):
        learned.observe("any", ONE, [OTHER], 2.0)
    assert learned.predict("any", ONE, [OTHER]) > 1.9
    for _ in range(256):
        learned.observe("any", ONE, [OTHER], random.choice((0.8, 1.2)))
    assert learned.predict("any", ONE, [OTHER]) == 1.0


def test_runs_that_waited_for_something_else_and_too_many_types_are_not_counted() -> None:
    learned = neighbours()
    learned.observe("any", ONE, [OTHER], 50.0)
    assert "any" not in learned.learned
    for number in range(40):
        learned.observe(f"type {number}", ONE, [OTHER], 2.0)
    assert "type 0" in learned.learned
    assert "type 39" not in learned.learned


def test_metrics_of_a_part_of_the_time_and_of_several_models() -> None:
    assert scaled(ONE, 0.5) == tuple([0.125 for _ in METRICS])
    assert mean_of([ONE, OTHER]) == tuple([0.5 for _ in METRICS])
    assert mean_of([ONE]) is ONE
