"""Text generation in plain PyTorch: a prompt in, tokens out as they are made (server-sent events).

The weights are random, with a fixed seed (so the text means nothing), unless the variable WEIGHTS
names a file with a state dictionary of `model.Transformer`.
"""

import json
import os

import torch

from .model import Transformer

MOST_TOKENS = 256
device = "cuda" if torch.cuda.is_available() else "cpu"


def load():
    """The model, on the GPU where there is one."""
    torch.manual_seed(0)
    model = Transformer()
    if os.environ.get("WEIGHTS"):
        weights = torch.load(
            os.environ["WEIGHTS"],
            map_location="cpu",
            weights_only=True,
        )
        model.load_state_dict(weights)
    return model.eval().to(device)


model = load()


def handle(event, context):
    """Takes text, or JSON with `prompt` (else the JSON is the prompt itself), `tokens` (32),
    `temperature` (0.8) and `seed` (0).
    """
    try:
        wishes = wishes_in(event.body)
    except (ValueError, TypeError) as error:
        return {"statusCode": 400, "body": {"error": str(error)}}
    return {
        "statusCode": 200,
        "headers": {"Content-Type": "text/event-stream", "Cache-Control": "no-store"},
        "body": events(*wishes),
    }


def wishes_in(body):
    """The prompt's tokens, how many are wanted, the temperature and the seed."""
    text = body.decode("utf-8", "replace")
    said = json.loads(text) if text.lstrip().startswith("{") else {"prompt": text}
    count = int(said.get("tokens", 32))
    if not 1 <= count <= MOST_TOKENS:
        raise ValueError(f"tokens are 1 to {MOST_TOKENS}")
    temperature = float(said.get("temperature", 0.8))
    if not 0 < temperature < 100:
        raise ValueError("temperature is above 0")
    prompt = list(str(said.get("prompt", text)).encode())[-(model.longest - count) :] or [0]
    return prompt, count, temperature, int(said.get("seed", 0))


def events(prompt, count, temperature, seed):
    """One event for each token, and a last one."""
    for token in tokens(prompt, count, temperature, seed):
        yield f"data: {json.dumps({'token': token, 'text': chr(token)})}\n\n"
    yield "data: [DONE]\n\n"


def tokens(prompt, count, temperature, seed):
    """Tokens, one by one; the cache stays where the model is."""
    chance = torch.Generator().manual_seed(seed)
    cache = model.empty_cache(device)
    given, first = prompt, 0
    for _ in range(count):
        positions = torch.arange(first, first + len(given), device=device)
        with torch.no_grad():
            logits, cache = model(torch.tensor([given], device=device), positions, cache)
        chances = (logits[0].cpu() / temperature).softmax(dim=0)
        token = int(torch.multinomial(chances, 1, generator=chance))
        yield token
        given, first = [token], first + len(given)
