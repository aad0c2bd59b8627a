"""The way into a process: sitecustomize and the import hook."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.kit.places import ACTIVATE
from tests.kit.programs.snippets import shim_environment

_CHECK = "import torch; assert torch.ones(2).cuda().is_cuda; "


def run_python(*arguments: str, cwd: Path, **environment: str) -> str:
    """What a Python under the shim prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=shim_environment(**environment),
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_is_patched_when_not_enabled(tmp_path: Path) -> None:
    code = "import sys; print([m for m in sys.modules if m.startswith('torch')], sys.meta_path[0])"
    printed = run_python("-c", code, cwd=tmp_path, GPUFAAS_ENABLED="0")
    assert "torch" not in printed
    assert "sitecustomize" not in printed


def test_torch_is_not_imported_when_unused(tmp_path: Path) -> None:
    code = (
        "import sys, importlib.util; importlib.util.find_spec('json');"
        "print([m for m in sys.modules if m.startswith('torch')])"
    )
    assert run_python("-c", code, cwd=tmp_path).strip() == "[]"


def test_torch_is_patched_once_when_asked_for_before_it_is_imported(tmp_path: Path) -> None:
    code = f"""
    import importlib.util, sys
    assert importlib.util.find_spec("torch") is not None  # as transformers does
    {_CHECK}
    assert importlib.util.find_spec("torch").origin == torch.__file__
    """
    run_python("-c", textwrap.dedent(code), cwd=tmp_path)


def test_program_that_chooses_a_card_before_it_imports_torch_has_none_but_the_shims(
    tmp_path: Path,
) -> None:
    code = f"""
    import os
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    {_CHECK}
    print(repr(os.environ["CUDA_VISIBLE_DEVICES"]))
    """
    assert run_python("-c", textwrap.dedent(code), cwd=tmp_path) == "''\n"


def test_user_without_a_name_has_one_for_torch(tmp_path: Path) -> None:
    code = f"""
    import getpass, os
    os.getuid = lambda: 54_321  # torch 2.11 asks whose caches it may use
    {_CHECK}
    import torch._dynamo
    print(getpass.getuser())
    """
    nobody = dict.fromkeys(("LOGNAME", "USER", "LNAME", "USERNAME"), "")
    assert run_python("-c", textwrap.dedent(code), cwd=tmp_path, **nobody) == "54321\n"


def test_path_is_left_alone_when_enabled(tmp_path: Path) -> None:
    code = "import sys; assert sys.argv[1] == '0' or __import__('torch'); print(sys.path)"
    without = run_python("-c", code, "0", cwd=tmp_path, GPUFAAS_ENABLED="0")
    assert run_python("-c", code, "1", cwd=tmp_path) == without


def test_passive_threads_are_set_when_the_user_did_not(tmp_path: Path) -> None:
    code = "import os; print(os.environ.get('OMP_WAIT_POLICY'))"
    assert run_python("-c", code, cwd=tmp_path).strip() == "PASSIVE"
    chosen = run_python("-c", code, cwd=tmp_path, OMP_WAIT_POLICY="ACTIVE")
    assert chosen.strip() == "ACTIVE"
    assert run_python("-c", code, cwd=tmp_path, GOMP_SPINCOUNT="10").strip() == "None"


def test_other_sitecustomize_runs_when_ours_shadows_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.shadowed = __file__\n")
    path = f"{ACTIVATE}:{tmp_path}"
    printed = run_python("-c", "import sys; print(sys.shadowed)", cwd=tmp_path, PYTHONPATH=path)
    assert printed.strip() == str(tmp_path / "sitecustomize.py")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_child_processes_are_under_the_shim_when_started(tmp_path: Path, method: str) -> None:
    (tmp_path / "program.py").write_text(
        textwrap.dedent(f"""
        import multiprocessing
        def work():
            {_CHECK}
        if __name__ == "__main__":
            {"import torch" if method == "fork" else ""}
            child = multiprocessing.get_context({method!r}).Process(target=work)
            child.start()
            child.join()
            print(child.exitcode)
        """)
    )
    assert run_python("-m", "program", cwd=tmp_path).strip() == "0"


@pytest.mark.slow
def test_torch_is_patched_when_imported_on_another_thread(tmp_path: Path) -> None:
    code = f"""
    import threading
    seen = []
    def work():
        {_CHECK}
        seen.append(True)
    threads = [threading.Thread(target=work) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    print(len(seen))
    """
    assert run_python("-c", textwrap.dedent(code), cwd=tmp_path).strip() == "3"


def test_import_names_the_setting_when_it_is_bad(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env=shim_environment(GPUFAAS_GPU_MEMORY="much"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "GPUFAAS_GPU_MEMORY='much': expected a positive number of bytes" in done.stderr
