"""What a function's deployment says about its GPU work: the runtime, and the part of a GPU."""

from typing import NamedTuple, Self
from urllib.parse import parse_qsl, urlencode

PROCESS, STREAM = RUNTIMES = ("process", "stream")
WHOLE_GPU = 1.0


class GpuWishes(NamedTuple):
    """How a function's models are hosted.

    Without a `runtime` the node decides. `share` is the part of a GPU's processors that the
    function's calls use at most.
    """

    runtime: str = ""
    share: float = WHOLE_GPU

    def text(self) -> str:
        """The wishes that differ from the usual ones, for a credential; empty if none do."""
        fields: dict[str, str] = {}
        if self.runtime:
            fields["runtime"] = self.runtime
        if self.share != WHOLE_GPU:
            fields["share"] = f"{self.share:g}"
        return urlencode(fields)

    @classmethod
    def of_text(cls, text: str) -> Self:
        """The wishes of such a text, which must come from a checked credential."""
        fields = dict(parse_qsl(text))
        return cls(fields.get("runtime", ""), float(fields.get("share", WHOLE_GPU)))


USUAL = GpuWishes()
