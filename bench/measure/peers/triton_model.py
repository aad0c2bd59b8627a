"""What Triton's Python backend runs of the models `noop` and `computing`; it sends lists of calls.

`triton_server.py` copies this file and `two_layers.py` into each model's folder.
"""

from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as triton  # type: ignore[import-not-found]  # of the backend
from two_layers import two_layers  # type: ignore[import-not-found]  # beside this file


class TritonPythonModel:
    """One instance of one of the models; each is a process of its own."""

    def initialize(self, args: dict[str, str]) -> None:
        """Make the model in this instance."""
        torch.set_num_threads(1)
        self._model = two_layers() if args["model_name"] == "computing" else None

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer all of them, by one run."""
        name, output = self._output(requests)
        return [
            triton.InferenceResponse([triton.Tensor(name, output[number : number + 1])])
            for number in range(len(requests))
        ]

    def _output(self, requests: list[Any]) -> tuple[str, Any]:
        """The output's name, and a row of it for each request."""
        if self._model is None:
            return "hello", np.full((len(requests), 1), "hello", dtype=object)
        found = [triton.get_input_tensor_by_name(each, "numbers").as_numpy() for each in requests]
        with torch.no_grad():
            return "scores", self._model(torch.from_numpy(np.concatenate(found))).numpy()
