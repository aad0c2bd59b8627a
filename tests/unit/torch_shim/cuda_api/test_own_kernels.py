"""Kernels that a program compiles itself are refused clearly; a small package stands for Triton."""

from pathlib import Path

import pytest

from tests.kit.programs.snippets import Snippet

LAUNCHER = """
class JITFunction:
    def run(self, *args, grid, **kwargs):
        return "launched"

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, **kwargs)
"""


@pytest.fixture
def triton(tmp_path: Path) -> Path:
    """The folder of a package with the launcher of Triton's name."""
    runtime = tmp_path / "triton" / "runtime"
    runtime.mkdir(parents=True)
    (tmp_path / "triton" / "__init__.py").touch()
    (runtime / "__init__.py").touch()
    (runtime / "jit.py").write_text(LAUNCHER)
    return tmp_path


def test_kernel_of_triton_is_refused_when_it_gets_a_gpu_tensor(shim: Snippet, triton: Path) -> None:
    shim(f"""
    import sys
    assert not any(name.partition(".")[0] == "triton" for name in sys.modules)
    sys.path.insert(0, {str(triton)!r})
    from triton.runtime.jit import JITFunction
    kernel = JITFunction()
    assert kernel[(1,)](torch.ones(2)) == "launched"
    for call in (lambda x: kernel[(1,)](x, 3), lambda x: kernel[(1,)](out=x)):
        try:
            call(torch.ones(2).cuda())
        except RuntimeError as error:
            assert "Triton kernel is not supported" in str(error)
            assert "PyTorch's operators" in str(error)
        else:
            raise AssertionError("it was launched")
    """)


def test_kernel_compiled_of_a_text_is_refused(shim: Snippet) -> None:
    shim("""
    from torch.cuda.jiterator import _create_jit_fn
    try:
        _create_jit_fn("template <typename T> T twice(T x) { return 2 * x; }")
    except RuntimeError as error:
        assert "is not supported on a redirected GPU" in str(error)
    else:
        raise AssertionError
    """)
