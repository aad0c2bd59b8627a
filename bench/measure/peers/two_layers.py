"""The model that every measured system serves: two small layers with the same weights in each.

The file is copied into our function's build and imported by the peers' servers, so it imports
torch and nothing of ours.
"""

import json

import torch

FEATURES, HIDDEN, SCORES = 16, 64, 4


def two_layers(seed: int = 0) -> torch.nn.Sequential:
    """The model on the CPU; the seed alone decides its weights."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.nn.Linear(FEATURES, HIDDEN), torch.nn.Linear(HIDDEN, SCORES)
    with torch.no_grad():
        for weights in (*first.parameters(), *second.parameters()):
            weights.uniform_(-0.25, 0.25, generator=generator)
    return torch.nn.Sequential(first, torch.nn.ReLU(), second).eval()


def numbers_of(body: bytes) -> list[float]:
    """The numbers that a request's JSON carries."""
    found: list[float] = json.loads(body)["numbers"]
    return found


def scores(model: torch.nn.Module, numbers: list[float], device: str = "cpu") -> list[float]:
    """The scores of one request's numbers, as the answer's JSON carries them."""
    with torch.no_grad():
        found: list[float] = model(torch.tensor([numbers], device=device))[0].tolist()
    return found
