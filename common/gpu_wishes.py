"""What a function's deployment says about its GPU work, as it travels in its credential."""

from typing import NamedTuple, Self
from urllib.parse import parse_qsl, urlencode

PROCESS, STREAM = RUNTIMES = ("process", "stream")


class GpuWishes(NamedTuple):
    """How a function's models are hosted; without a `runtime` the node decides."""

    runtime: str = ""

    def text(self) -> str:
        """The wishes that there are, for a credential; empty if there are none."""
        return urlencode({"runtime": self.runtime} if self.runtime else {})

    @classmethod
    def of_text(cls, text: str) -> Self:
        """The wishes of such a text, which must come from a checked credential."""
        return cls(dict(parse_qsl(text)).get("runtime", ""))


USUAL = GpuWishes()
