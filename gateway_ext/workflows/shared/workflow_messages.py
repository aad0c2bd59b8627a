"""The stream of workflows: its subjects, and the messages at them; pure.

Each workflow has one message, the last one at a subject of its own: its file, or a mark that it was
removed, which stays until all gateways have read it.
"""

import json
from dataclasses import dataclass

from gateway_ext.workflows.plan.workflow_values import WorkflowId

_VERSION = 1


@dataclass(frozen=True, slots=True)
class WorkflowSubjects:
    """The names of the stream and of its subjects, with the prefix of the job queue."""

    prefix: str

    @property
    def stream(self) -> str:
        """The name of the stream."""
        return f"{self.prefix}_workflows"

    @property
    def all(self) -> str:
        """All subjects of the stream."""
        return f"{self.prefix}.workflows.>"

    @property
    def reader(self) -> str:
        """Where a gateway that begins to read leaves a message, to know where it has read all."""
        return f"{self.prefix}.workflows.reader"

    def of(self, workflow: WorkflowId) -> str:
        """The subject of a workflow: names have no dots."""
        return f"{self.prefix}.workflows.deployed.{workflow.namespace}.{workflow.name}"

    def workflow(self, subject: str) -> WorkflowId | None:
        """The workflow of a subject; None: it is the subject of no workflow."""
        words = subject.removeprefix(f"{self.prefix}.workflows.").split(".")
        match words:
            case ["deployed", namespace, name]:
                return WorkflowId(namespace, name)
            case _:
                return None


def encode(text: str | None) -> bytes:
    """The message of a workflow with this file; None: it was removed."""
    return json.dumps({"v": _VERSION, "text": text}).encode()


def decode(content: bytes) -> str | None:
    """The file; None for a removed workflow; ValueError where the content is no message of ours."""
    try:
        fields = json.loads(content)
        version, text = fields["v"], fields["text"]
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a workflow: {error!r}") from error
    if version != _VERSION:
        raise ValueError(f"a workflow of version {version}, not {_VERSION}")
    if not isinstance(text, str | None):
        raise ValueError("not a workflow: its text is none")
    if text is not None:
        text.encode()  # UnicodeEncodeError, a ValueError, where it cannot be written to a file
    return text


def is_removed(content: bytes) -> bool:
    """Whether a message is the mark of a removed workflow."""
    try:
        return decode(content) is None
    except ValueError:
        return False  # a message of a later version stays untouched
