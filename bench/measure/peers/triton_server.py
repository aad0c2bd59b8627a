"""NVIDIA Triton, run by its own Python: `triton_server.py PROGRAM PORT`, until stdin ends.

PROGRAM is `noop` or `computing`, the model that it serves. The server is the one in the wheel of
pytriton, whose own way to add a model would put one process more between server and model.
"""

import shutil
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

from peer_life import run_server  # type: ignore[import-not-found]  # beside this script
from two_layers import FEATURES, SCORES  # type: ignore[import-not-found]

_HERE = Path(__file__).resolve().parent
_INSTALLED = Path(sysconfig.get_path("purelib")) / "pytriton" / "tritonserver"
_BACKENDS = _INSTALLED / "backends"
_STUB = "triton_python_backend_stub"
_MOST, _INSTANCES = 64, 2
_OUTPUTS = {
    "noop": 'name: "hello" data_type: TYPE_STRING dims: [1]',
    "computing": f'name: "scores" data_type: TYPE_FP32 dims: [{SCORES}]',
}


def main() -> None:
    """Serve until the starting process closes standard input."""
    program, port = sys.argv[1:]
    _add_stub()
    models = Path("models").resolve()  # the starting process removes the current folder
    _write_model(models / program, program)
    run_server(
        [
            *("/usr/bin/env", *_settings(), str(_INSTALLED / "bin" / "tritonserver")),
            *("--model-repository", str(models), "--backend-directory", str(_BACKENDS)),
            *("--http-address", "127.0.0.1", "--http-port", port),
            *("--allow-grpc", "false", "--allow-metrics", "false", "--log-info", "false"),
        ],
        f"http://127.0.0.1:{port}/v2/health/ready",
    )


def _add_stub() -> None:
    """Put the program that runs a model's Python where Triton looks for it."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    with suppress(FileExistsError):
        (_BACKENDS / "python" / _STUB).symlink_to(
            _INSTALLED / "python_backend_stubs" / version / _STUB
        )


def _write_model(folder: Path, program: str) -> None:
    code = folder / "1"
    code.mkdir(parents=True)
    shutil.copy(_HERE / "triton_model.py", code / "model.py")
    shutil.copy(_HERE / "two_layers.py", code)
    # A batch is what waits when an instance becomes free: no call is delayed for it.
    (folder / "config.pbtxt").write_text(
        f'backend: "python" max_batch_size: {_MOST} dynamic_batching {{ }}\n'
        f'input {{ name: "numbers" data_type: TYPE_FP32 dims: [{FEATURES}] }}\n'
        f"output {{ {_OUTPUTS[program]} }}\n"
        f"instance_group {{ count: {_INSTANCES} kind: KIND_CPU }}\n",
        encoding="utf-8",
    )


def _settings() -> list[str]:
    """The stub finds this environment by its path, and links the library of the same Python."""
    library = sysconfig.get_config_var("LIBDIR")
    return [f"PATH={Path(sys.executable).parent}:/usr/bin:/bin", f"LD_LIBRARY_PATH={library}"]


if __name__ == "__main__":
    main()
