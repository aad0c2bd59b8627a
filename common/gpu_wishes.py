"""What a function's deployment says about its GPU work, as it travels in its credential."""

from typing import NamedTuple, Self
from urllib.parse import parse_qsl, urlencode

PROCESS, STREAM = RUNTIMES = ("process", "stream")
WHOLE = 1.0  # the share of a GPU's multiprocessors that a model has without a wish
# Concurrent calls that run as one: as many as measurements say; never.
AS_MEASURED, UNMERGED = 0, 1


class GpuWishes(NamedTuple):
    """How a function's models are hosted, and on what `share` of a GPU's multiprocessors they run.

    Without a `runtime` the node decides. No more than `merged` concurrent calls run as one, unless
    it is AS_MEASURED.
    """

    runtime: str = ""
    share: float = WHOLE
    merged: int = AS_MEASURED

    def text(self) -> str:
        """The wishes that there are, for a credential; empty if there are none."""
        fields = {"runtime": self.runtime} if self.runtime else {}
        if self.share != WHOLE:
            fields["share"] = f"{self.share:.6g}"
        if self.merged != AS_MEASURED:
            fields["batch"] = str(self.merged)
        return urlencode(fields)

    @classmethod
    def of_text(cls, text: str) -> Self:
        """The wishes of such a text, which must come from a checked credential."""
        fields = dict(parse_qsl(text))
        merged = int(fields.get("batch", AS_MEASURED))
        return cls(fields.get("runtime", ""), float(fields.get("share", WHOLE)), merged)


USUAL = GpuWishes()
