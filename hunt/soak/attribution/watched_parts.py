"""Has parts of a stack watch their own memory."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hunt.soak.attribution.heap_watch import END

PARTS = ("gateway", "scheduler", "gpu-manager", "up")
DETAILS = ("lines", "holders")
_HOOK = '''"""Made for one soak: the parts that it names watch their own memory."""

import sys

sys.path.append({root!r})
from hunt.soak.attribution.heap_watch import watch_if_chosen

watch_if_chosen({folder!r}, {parts!r}, {every_s!r}, {detail!r})
'''
_ROOT = Path(__file__).resolve().parents[3]
_END_S, _ASK_S = 120.0, 0.2


@dataclass(frozen=True, slots=True)
class WatchPlan:
    """Which parts are watched, how often each says what it has, and in which detail."""

    parts: Sequence[str] = ()
    every_s: float = 20.0
    detail: str = ""


def watching(plan: WatchPlan, folder: Path) -> Mapping[str, str]:
    """The variables by which Python processes look whether they are to watch themselves."""
    if not plan.parts:
        return {}
    hook = folder / "hook"
    hook.mkdir()
    text = _HOOK.format(
        root=str(_ROOT),
        folder=str(folder),
        parts=tuple(plan.parts),
        every_s=plan.every_s,
        detail=plan.detail,
    )
    (hook / "sitecustomize.py").write_text(text, encoding="utf-8")
    return {"PYTHONPATH": str(hook)}


def end_watch(folder: Path) -> list[Path]:
    """Have every watched process write its last samples; the files of all of them.

    One that does not answer in time has its file without these: nothing else is lost for it.
    """
    (folder / END).touch()
    patience_s = time.monotonic() + _END_S
    while time.monotonic() < patience_s:
        files = sorted(folder.glob("*.jsonl"))
        if all(file.with_name(f"{file.name}.{END}").exists() for file in files if _runs(file)):
            break
        time.sleep(_ASK_S)
    return sorted(folder.glob("*.jsonl"))


def _runs(file: Path) -> bool:
    """Whether the process that writes this file is still there."""
    return Path("/proc", file.stem.rpartition("-")[2]).exists()
