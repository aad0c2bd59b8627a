"""Ray Serve, run by its own Python, until standard input ends: `ray_server.py PROGRAM PORT`.

PROGRAM is `noop`; `computing`; one of `ray_batched.py`; `zipf`, where a load has the GPU to itself
as it has with us; or `zipf-overlapped`, where another model runs meanwhile.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import ray  # type: ignore[import-not-found]  # installed in an environment of its own
from ray import serve
from ray.serve.schema import LoggingConfig  # type: ignore[import-not-found]
from ray_batched import serve_batched  # type: ignore[import-not-found]  # beside this script
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from two_layers import (  # type: ignore[import-not-found]  # beside this script
    numbers_of,
    scores,
    two_layers,
)

_WORKERS = 2
_REPLICAS, _ROOM = 4, 4
_LOAD_S, _RUN_S = 0.25, 0.02
_HIT, _MISS = 200, 201
# The default of 5 collapses at 32 clients; with its multiplexing the default does better.
_MANY = 100
# Replicas log each call unless their own settings say otherwise; those of `serve.start` do not
# reach them.
_WITHOUT_ACCESS_LOG = LoggingConfig(enable_access_log=False)


@serve.deployment(
    num_replicas=_WORKERS,
    max_ongoing_requests=_MANY,
    ray_actor_options={"num_cpus": 0},
    logging_config=_WITHOUT_ACCESS_LOG,
)
class EmptyDeployment:
    """Answers every request alike."""

    async def __call__(self, request: Request) -> Response:
        """Read the body, as any function does."""
        await request.body()
        return Response(b"hello")


@serve.deployment(
    num_replicas=_WORKERS,
    max_ongoing_requests=_MANY,
    ray_actor_options={"num_cpus": 0},
    logging_config=_WITHOUT_ACCESS_LOG,
)
class ComputingDeployment:
    """Serves the small model."""

    def __init__(self) -> None:
        self._model = two_layers()

    async def __call__(self, request: Request) -> Response:
        """The scores of one request."""
        return JSONResponse({"scores": scores(self._model, numbers_of(await request.body()))})


@serve.deployment(
    num_replicas=_REPLICAS,
    ray_actor_options={"num_cpus": 0},
    logging_config=_WITHOUT_ACCESS_LOG,
)
class Models:
    """A GPU with room for four models; load and run only take time."""

    def __init__(self, what: str) -> None:
        self._gpu = asyncio.Lock()
        self._loading = asyncio.Lock() if what == "zipf-overlapped" else self._gpu
        self._loaded: set[str] = set()

    @serve.multiplexed(max_num_models_per_replica=_ROOM)  # type: ignore[untyped-decorator]
    async def load(self, name: str) -> "_Model":
        """Load a model; Ray calls this where the replica does not have the model."""
        async with self._loading:
            await asyncio.sleep(_LOAD_S)
        return _Model(name, self._loaded)

    async def __call__(self, request: Request) -> Response:
        """One inference at a time, as on a GPU."""
        await request.body()
        name = serve.get_multiplexed_model_id()
        status = _HIT if name in self._loaded else _MISS
        await self.load(name)
        async with self._gpu:
            await asyncio.sleep(_RUN_S)
        return Response(b"hello", status_code=status)


class _Model:
    """Ray evicts the model used least recently: it calls `__del__` and drops the object."""

    def __init__(self, name: str, loaded: set[str]) -> None:
        self._name: str | None = name
        self._loaded = loaded
        loaded.add(name)

    def __del__(self) -> None:
        if self._name is not None:
            self._loaded.discard(self._name)
            self._name = None


def main() -> None:
    """Serve until the starting process closes standard input."""
    program, port = sys.argv[1], int(sys.argv[2])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=str(Path.cwd()),  # the starting process removes the folder
    )
    try:
        serve.start(
            http_options={"host": "127.0.0.1", "port": port},
            logging_config=_WITHOUT_ACCESS_LOG,
        )
        if program.startswith("batched:"):
            serve_batched(program, _WITHOUT_ACCESS_LOG)
        else:
            serve.run(_application(program))
        print("ready", flush=True)
        sys.stdin.read()
        serve.shutdown()
    finally:
        ray.shutdown()


def _application(program: str) -> Any:
    noop: Any = EmptyDeployment
    computing: Any = ComputingDeployment
    models: Any = Models
    if program == "noop":
        return noop.bind()
    return computing.bind() if program == "computing" else models.bind(program)


if __name__ == "__main__":
    main()
