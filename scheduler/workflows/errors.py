"""What can be wrong with a workflow.

WorkflowError
├── BadWorkflow     a graph that no run could follow to its end
└── BadProfile      measured times that the search cannot use
"""


class WorkflowError(Exception):
    """Base of every error about a workflow."""


class BadWorkflow(WorkflowError):
    """The graph of a workflow has a defect; `stage` is where, if it is one stage's."""

    def __init__(self, workflow: str, reason: str, stage: str = "") -> None:
        super().__init__(f"workflow {workflow}: {reason}")
        self.workflow = workflow
        self.reason = reason
        self.stage = stage


class BadProfile(WorkflowError):
    """A stage's profile is empty, or has a time or batch that is not positive."""
