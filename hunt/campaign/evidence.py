"""What is kept of a round with a violation: enough to look at it without the system."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hunt.campaign.round_records import RoundRecord
from hunt.campaign.worlds.world import World

_DUMP_S = 20.0
_FILES = ("status", "stack", "wchan", "limits", "smaps_rollup")


def keep(world: World, record: RoundRecord, journal: Path, folder: Path, command: str) -> Path:
    """Write everything into a folder of the round's own, below `folder`; that folder."""
    into = folder / f"{record.world}-{record.fault}-{record.number}"
    shutil.rmtree(into, ignore_errors=True)
    (into / "logs").mkdir(parents=True)
    text = [f"to repeat it: {command}", "", *record.violations, "", repr(record)]
    (into / "README").write_text("\n".join(text) + "\n")
    for number, log in enumerate(world.logs()):
        with suppress(FileNotFoundError):
            shutil.copy(log, into / "logs" / f"{number}-{log.name}")
    shutil.copy(journal, into / "calls.jsonl")
    (into / "holdings").write_text(_holdings(world) + "\n")
    _processes(world.processes(), into / "proc")
    return into


def _holdings(world: World) -> str:
    try:
        return repr(world.holdings())
    except Exception as error:  # noqa: BLE001 - whatever is broken here belongs to the evidence
        return f"not to be had: {error!r}"


def _processes(processes: Mapping[int, str], into: Path) -> None:
    """Of every process its state, descriptors, memory, and what its Python threads do."""
    dumper = Path(sys.executable).with_name("py-spy")
    for pid, command in processes.items():
        kept = into / str(pid)
        kept.mkdir(parents=True)
        (kept / "command").write_text(command + "\n")
        for name in _FILES:
            with suppress(OSError):
                (kept / name).write_bytes(Path(f"/proc/{pid}/{name}").read_bytes())
        with suppress(OSError):
            links = [f"{fd.name} {fd.readlink()}" for fd in Path(f"/proc/{pid}/fd").iterdir()]
            (kept / "descriptors").write_text("\n".join(links) + "\n")
        if dumper.exists() and "python" in command:
            _dump(dumper, pid, kept / "threads")


def _dump(dumper: Path, pid: int, into: Path) -> None:
    command = [str(dumper), "dump", "--nonblocking", "--pid", str(pid)]
    with into.open("wb") as out, suppress(subprocess.TimeoutExpired):
        subprocess.run(command, stdout=out, stderr=out, timeout=_DUMP_S, check=False)
