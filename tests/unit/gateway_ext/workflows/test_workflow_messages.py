"""Messages of the stream of workflows: read strictly, since others write them too."""

import pytest

from gateway_ext.workflows.plan import WorkflowId
from gateway_ext.workflows.stream import (
    WorkflowSubjects,
    decode,
    encode,
    is_removed,
)

SUBJECTS = WorkflowSubjects("mine")


@pytest.mark.parametrize("text", ["workflow: w\nstages: {ä: 1}", "", None])
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
def test_other_messages_are_no_workflows(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever is wrong with it
        decode(content)
    assert not is_removed(content)


def test_subject_is_that_of_one_workflow() -> None:
    workflow = WorkflowId("team", "w-1_2")
    assert SUBJECTS.workflow(SUBJECTS.of(workflow)) == workflow
    for other in (SUBJECTS.reader, "mine.workflows.deployed.a", "mine.jobs.call.x"):
        assert SUBJECTS.workflow(other) is None
