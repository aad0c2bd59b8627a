"""Ray Serve's programs with batches: `batched:REPLICAS:THREADS:WAIT_S:MOST`, each model's path."""

import json
from typing import Any

import torch
from four_models import NAMES, answers, made  # type: ignore[import-not-found]  # beside this file
from ray import serve  # type: ignore[import-not-found]  # installed in an environment of its own
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

_MANY = 256


class _Batched:
    """Serves one model; Ray gathers the calls of `run`."""

    def __init__(self, name: str, threads: int, most: int, wait_s: float) -> None:
        torch.set_num_threads(threads)
        self._name, self._model = name, made(name)
        self.run.set_max_batch_size(most)
        self.run.set_batch_wait_timeout_s(wait_s)

    @serve.batch  # type: ignore[untyped-decorator]
    async def run(self, requests: list[dict[str, str]]) -> list[dict[str, list[float]]]:
        """Answer all of them by one run."""
        found: list[dict[str, list[float]]] = answers(self._model, self._name, requests)
        return found

    async def __call__(self, request: Request) -> Response:
        """One call."""
        return JSONResponse(await self.run(json.loads(await request.body())))


def serve_batched(program: str, logging: Any) -> None:
    """Serve each model below its name."""
    _, replicas, threads, wait_s, most = program.split(":")
    deployment: Any = serve.deployment(
        num_replicas=int(replicas),
        max_ongoing_requests=_MANY,
        ray_actor_options={"num_cpus": 0},
        logging_config=logging,
    )(_Batched)
    for name in NAMES:
        bound = deployment.bind(name, int(threads), int(most), float(wait_s))
        serve.run(bound, name=name, route_prefix=f"/{name}")
