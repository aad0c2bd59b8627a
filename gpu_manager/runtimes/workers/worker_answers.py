"""How long a worker's answer is waited for."""

import asyncio
from typing import Any

# If the event loop wakes later than this, the loop itself was delayed: an answer may be unread.
_DELAYED_S = 0.05


async def wait_within(answer: asyncio.Future[Any], grace_s: float) -> None:
    """Wait for an answer; raise TimeoutError if the worker is late, not if this process is."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + grace_s
    while not (await asyncio.wait({answer}, timeout=deadline_s - loop.time()))[0]:
        late_s = loop.time() - deadline_s
        if late_s < _DELAYED_S:
            raise TimeoutError
        deadline_s = loop.time() + min(late_s, grace_s)
