"""Ends all processes of a user, wherever they hide; only root can."""

import subprocess
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path

from gateway_ext.errors import ProviderFailed
from gateway_ext.providers.process import process_table

_PROGRAM = Path(__file__).with_name("end_program.py")
_WITHIN_S = 10.0  # a killed process may first have to give a lot of memory back
_POLL_S = 0.05


class EndedUsers:
    """Ends users by means of a user id that has no processes but its own."""

    def __init__(self, own_uid: int) -> None:
        self._own_uid = own_uid
        self._one_at_a_time = threading.Lock()

    def end(self, uids: Collection[int]) -> None:
        """Kill all processes of these users; ProviderFailed if one is still there afterwards.

        Sessions, marks and namespaces do not matter, and no process escapes by forking. The ids
        must be held by this gateway (`UserIds`): whatever has them is killed.
        """
        if not uids:
            return
        command = [sys.executable, "-I", "-S", str(_PROGRAM), str(self._own_uid), *map(str, uids)]
        with self._one_at_a_time:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            )
        if done.returncode:
            raise ProviderFailed(
                f"processes of users {_shown(uids)} cannot be ended: {done.stderr}"
            )
        self._wait_until_gone(frozenset(uids))

    def _wait_until_gone(self, uids: frozenset[int]) -> None:
        deadline_s = time.monotonic() + _WITHIN_S
        while left := uids & process_table.users():
            if time.monotonic() > deadline_s:
                raise ProviderFailed(f"processes of users {_shown(left)} do not end")
            time.sleep(_POLL_S)


def _shown(uids: Collection[int]) -> str:
    return ", ".join(map(str, sorted(uids)))
