"""The models that batching is measured with, and the bytes of their calls, the same in each system.

The file is copied into our functions' builds and imported by the peers' servers, so it imports
torch and nothing of ours.
"""

import base64
import json
from collections.abc import Callable, Sequence

import torch
import torchvision  # type: ignore[import-untyped]  # it has no types
from transformers import BertConfig, BertModel

_SHOWN = 8  # numbers of an output that an answer carries
_PIXELS, _WORDS, _VOCABULARY = (3, 64, 64), (16,), 1000


class _Bert(torch.nn.Module):
    """The first of bert's outputs."""

    def __init__(self) -> None:
        super().__init__()
        small = BertConfig(
            hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256
        )
        self.bert = BertModel(small)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.bert(input_ids=words, return_dict=False)[0]
        return found


def _vit() -> torch.nn.Module:
    sizes = {"num_layers": 4, "num_heads": 4, "hidden_dim": 256, "mlp_dim": 512}
    made: torch.nn.Module = torchvision.models.VisionTransformer(64, 16, **sizes)
    return made


_MADE: dict[str, Callable[[], torch.nn.Module]] = {
    "resnet18": torchvision.models.resnet18,
    "mobilenet_v3_small": torchvision.models.mobilenet_v3_small,
    "vit": _vit,
    "bert": _Bert,
}
NAMES = tuple(_MADE)


def made(name: str) -> torch.nn.Module:
    """The model on the CPU, with the same weights in every process."""
    torch.manual_seed(0)
    return _MADE[name]().eval()


def random_input(name: str) -> torch.Tensor:
    """An input of batch 1, as the model takes it."""
    if name == "bert":
        return torch.randint(0, _VOCABULARY, (1, *_WORDS))
    return torch.randn(1, *_PIXELS)


def bodies(name: str, count: int) -> list[bytes]:
    """Calls with different inputs, the same each time: bytes in base64 in JSON."""
    random = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        if name == "bert":
            drawn = torch.randint(0, _VOCABULARY, _WORDS, generator=random, dtype=torch.int16)
        else:
            drawn = torch.randint(0, 256, _PIXELS, generator=random, dtype=torch.uint8)
        data = base64.b64encode(drawn.numpy().tobytes()).decode()
        found.append(json.dumps({"data": data}).encode())
    return found


def input_of(name: str, request: dict[str, str]) -> torch.Tensor:
    """What the model takes of one call, without the batch's dimension."""
    data = bytearray(base64.b64decode(request["data"]))
    if name == "bert":
        return torch.frombuffer(data, dtype=torch.int16).long()
    return torch.frombuffer(data, dtype=torch.uint8).reshape(_PIXELS) / 255


def shown(output: torch.Tensor) -> dict[str, list[float]]:
    """The answer to one call: the first numbers of its output."""
    return {"scores": output.flatten()[:_SHOWN].tolist()}


def answers(
    model: torch.nn.Module, name: str, requests: Sequence[dict[str, str]]
) -> list[dict[str, list[float]]]:
    """Run the model once for all of these calls."""
    with torch.no_grad():
        outputs = model(torch.stack([input_of(name, request) for request in requests]))
    return [shown(output) for output in outputs]
