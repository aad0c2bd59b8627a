"""How often each model broke a process of others, in a file that outlives the manager."""

import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FILE = "process-breaks.json"
_FORGOTTEN_S = 24 * 3600.0  # a function may have been mended, and its weights be the same
_MOST_MODELS = 4096
_MOST_CHARACTERS = 512  # of a model's name
_MOST_BYTES = 4 << 20


class ProcessBreaks:
    """Counts by model; one that broke nothing for a day is forgotten.

    Without a file the counts end with the manager. Managers may share one: the higher count holds.
    """

    def __init__(self, path: Path | None = None, unix_s: Callable[[], float] = time.time) -> None:
        """Read the file, if there is one; what cannot be read counts as nothing."""
        self._path = path
        self._unix_s = unix_s
        self._counts: dict[str, tuple[int, float]] = {}  # and when the last one was
        self._merge()

    def __getitem__(self, model: str) -> int:
        """Return how often this model broke a process lately."""
        count, last_s = self._counts.get(model, (0, 0.0))
        return count if self._unix_s() - last_s < _FORGOTTEN_S else 0

    def add(self, model: str) -> None:
        """Count once more, and keep it."""
        before = self[model]
        self._merge()
        if model not in self._counts and len(self._counts) >= _MOST_MODELS:
            return
        if len(model) <= _MOST_CHARACTERS:
            self._counts[model] = (max(before, self[model]) + 1, self._unix_s())
            self._write()

    def _merge(self) -> None:
        """Take over what the file has, and drop what is old."""
        now_s = self._unix_s()
        for model, (count, last_s) in self._read().items():
            self._counts[model] = max(
                self._counts.get(model, (0, 0.0)), (count, min(last_s, now_s))
            )
        self._counts = {
            model: found for model, found in self._counts.items() if now_s - found[1] < _FORGOTTEN_S
        }

    def _read(self) -> dict[str, tuple[int, float]]:
        if self._path is None:
            return {}
        try:
            with self._path.open("rb") as file:
                return _checked(json.loads(file.read(_MOST_BYTES)))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s: %s: no model has broken a process, then", self._path, error)
            return {}

    def _write(self) -> None:
        if self._path is None:
            return
        aside = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({model: list(found) for model, found in self._counts.items()}, file)
            aside.replace(self._path)
        except OSError as error:
            log.warning("%s: %s: it is forgotten with this manager", self._path, error)
            aside.unlink(missing_ok=True)


def _checked(found: Any) -> dict[str, tuple[int, float]]:
    """What a file says, if it is one of ours."""
    if not isinstance(found, dict) or len(found) > _MOST_MODELS:
        raise ValueError("it is no table of models")
    counts: dict[str, tuple[int, float]] = {}
    for model, entry in found.items():
        match entry:
            case [int(count), float(last_s)] if len(model) <= _MOST_CHARACTERS and count > 0:
                counts[model] = (count, last_s)
            case _:
                raise ValueError(f"{model:.80}: {entry!r:.80} is no count and time")
    return counts
