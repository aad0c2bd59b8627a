"""Which files belong to a program."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from gpufaas.check.project_files import read_project
from gpufaas.errors import CommandError


def project(folder: Path, files: Mapping[str, str]) -> Path:
    """A project's folder with these files; its script."""
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return folder / "app.py"


def names(folder: Path, files: Mapping[str, str]) -> list[str]:
    """The files read, from the project's folder."""
    script = project(folder, files)
    return [str(path.relative_to(folder.resolve())) for path in read_project(script)]


def test_project_has_the_modules_that_the_script_imports(tmp_path: Path) -> None:
    files = {
        "app.py": "import models.net\nfrom helpers import load\nimport json\n",
        "helpers.py": "def late():\n    import deep\n",
        "deep.py": "",
        "models/__init__.py": "from . import losses\nfrom .parts import *\n",
        "models/net.py": "from ..nowhere import x\n",
        "models/losses.py": "",
        "models/parts.py": "",
        "unused.py": "",
    }

    found = names(tmp_path, files)

    assert found[0] == "app.py"
    assert sorted(found) == sorted(set(files) - {"unused.py"})


def test_project_is_without_installed_packages(tmp_path: Path) -> None:
    files = {
        "app.py": "import env.site_packages\nimport lib\n",
        "lib/__init__.py": "from .site import x\n",
        "lib/site.py": "",
    }
    installed = {"site-packages/torch.py": "", "app.py": "import torch\n"}

    assert names(tmp_path / "one", files) == ["app.py", "lib/__init__.py", "lib/site.py"]
    assert names(tmp_path / "other", installed) == ["app.py"]


def test_modules_that_import_each_other_are_read_once(tmp_path: Path) -> None:
    files = {"app.py": "import one\n", "one.py": "import app, other\n", "other.py": "import one\n"}

    assert names(tmp_path, files) == ["app.py", "one.py", "other.py"]


def test_script_is_refused_with_its_line_when_it_is_no_python(tmp_path: Path) -> None:
    script = project(tmp_path, {"app.py": "import one\n", "one.py": "x = 1\ny = (\n"})

    with pytest.raises(CommandError, match=r"one\.py:2: this is no Python"):
        read_project(script)


def test_script_is_refused_when_it_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"app\.py: No such file"):
        read_project(tmp_path / "app.py")
