"""A function's first moments, timed from within.

`python -m bench.shim.first_moments resnet50|bert` is run natively and under the shim.

Prints one line of JSON; times other than that of the import count from the import's end.
"""

import time

_began_s = time.perf_counter()
import torch  # noqa: E402 - the import is what is timed

_imported_s = time.perf_counter()

import importlib  # noqa: E402 - see above
import json  # noqa: E402 - see above
import sys  # noqa: E402 - see above
from collections.abc import Callable  # noqa: E402 - see above

_MOST_S = 60.0
_FEWEST_CALLS = 5


def main() -> None:
    """Make the model, then call it until a graph answers."""
    make = {"resnet50": _resnet50, "bert": _bert}[sys.argv[1]]
    call = make(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    made_s = _since_import()
    seconds: list[float] = []
    ends: list[float] = []
    graph_s: float | None = None
    local = 0
    shim = "torch_shim" in sys.modules
    while len(seconds) < _FEWEST_CALLS or (shim and graph_s is None and ends[-1] < _MOST_S):
        began_s = _since_import()
        call()
        ends.append(_since_import())
        seconds.append(ends[-1] - began_s)
        if graph_s is None and _graph_calls():
            graph_s = ends[-1]
            local = len(seconds) - 1
    found = {"import_s": _imported_s - _began_s, "made_s": made_s, "first_s": ends[0]}
    found |= {"call_s": sorted(seconds)[len(seconds) // 2]}
    if graph_s is not None:
        found |= {
            "graph_s": graph_s,
            "local_calls": local,
            "slowest_local_s": max(seconds[:local] or [0.0]),
        }
    print(json.dumps(found))


def _resnet50(device: torch.device) -> Callable[[], object]:
    torchvision = importlib.import_module("torchvision")
    torch.manual_seed(0)
    model = torchvision.models.resnet50().eval().to(device)
    given = torch.rand(1, 3, 224, 224).to(device)
    return lambda: _without_gradients(model, given)


def _bert(device: torch.device) -> Callable[[], object]:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig()).eval().to(device)
    words = torch.randint(0, 30000, (1, 64)).to(device)
    return lambda: _without_gradients(model, words)


def _without_gradients(model: Callable[[torch.Tensor], object], given: torch.Tensor) -> object:
    with torch.no_grad():
        return model(given)


def _graph_calls() -> int:
    module = sys.modules.get("torch_shim.process_report")
    return 0 if module is None else int(module.report.counts.graph_calls)


def _since_import() -> float:
    return time.perf_counter() - _imported_s


if __name__ == "__main__":
    main()
