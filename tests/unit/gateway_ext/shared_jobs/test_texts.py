"""Messages of the texts that gateways share: read strictly, since others write them too."""

import pytest

from gateway_ext.shared_jobs.store import (
    decode,
    encode,
    is_removed,
    key_of,
)


@pytest.mark.parametrize("text", ["lines: w\nmore: {ä: 1}", "", None])
def test_message_is_read_as_it_was_written(text: str | None) -> None:
    assert decode(encode(text)) == text
    assert is_removed(encode(text)) == (text is None)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff", b"[]", b"7", b"{}", b'{"v": 1}', b'{"v": 2, "text": null}',
        b'{"v": 1, "text": 7}', b'{"v": 1, "text": "\\ud800"}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_other_messages_are_no_texts(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever is wrong with it
        decode(content)
    assert not is_removed(content)


def test_subject_is_that_of_one_text() -> None:
    assert key_of("deployed.team.w-1_2") == ("team", "w-1_2")
    for other in ("reader", "deployed.a", "deployed.a.b.c", "mine.jobs.call"):
        assert key_of(other) is None
