"""What is remembered, and what is forgotten, of a dictionary of bounded size."""

from common.latest import Latest


def test_entries_that_were_set_last_are_there_however_many_have_come_and_gone() -> None:
    known = Latest[str, int](10)
    for number in range(20):
        known[f"n{number}"] = number
        known["busy"] = number

    assert len(known) == 10
    assert list(known) == [*(f"n{number}" for number in range(11, 20)), "busy"]
    assert (known.get("n10"), known["n19"], known["busy"]) == (None, 19, 19)
