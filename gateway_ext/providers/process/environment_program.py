"""The program that fills an environment, with the rights of its build: it runs code of packages.

It is given to an interpreter as text, with one argument: JSON with the environment's folder, the
folders of packages that it shares, whether pip must install what requirements.txt asks for, and
whether it needs a pip of its own for that.
"""

import json
import os
import sys
import venv
from pathlib import Path

_OPTIONS = ["--no-input", "--disable-pip-version-check", "--no-cache-dir", "--progress-bar", "off"]


def main() -> None:
    """Make the environment; never returns if pip has something to do."""
    orders = json.loads(sys.argv[1])
    folder, shared = Path(orders["folder"]), orders["shared"]
    venv.create(folder, symlinks=True, with_pip=orders["own_pip"])
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "_gateway.pth").write_text("".join(f"{path}\n" for path in shared), "utf-8")
    if orders["install"]:
        python = str(folder / "bin" / "python")
        pip = [python, "-m", "pip", "install", *_OPTIONS, "-r", str(folder / "requirements.txt")]
        os.execv(python, pip)


if __name__ == "__main__":
    main()
