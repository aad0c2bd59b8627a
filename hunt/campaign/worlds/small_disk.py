"""A folder on a small disk of its own, which can be filled and emptied again."""

import subprocess
from contextlib import suppress
from pathlib import Path

_BLOCK = bytes(1 << 16)
_FILLING = ".filled-by-the-campaign"


class SmallDisk:
    """A tmpfs on this folder; it goes with the mount name space of the campaign."""

    def __init__(self, folder: Path, mib: int, *, mode: int = 0o755) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        options = f"size={mib}m,mode={mode:o}"
        command = ["mount", "-t", "tmpfs", "-o", options, "campaign", str(folder)]
        subprocess.run(command, check=True)

    def fill(self) -> None:
        """Leave no room at all."""
        with (self.folder / _FILLING).open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(_BLOCK)

    def empty(self) -> None:
        """Leave room again."""
        with suppress(FileNotFoundError):
            (self.folder / _FILLING).unlink()

    def end(self) -> None:
        """Have the folder as it was; nobody uses it any more."""
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)
