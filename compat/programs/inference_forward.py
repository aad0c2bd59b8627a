"""Language models as Meta writes them: forward under inference_mode, caches in buffers."""

import sys

import torch
from torch import nn
from torch.nn import functional

WIDTH, HEADS, LENGTH = 32, 4, 24


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        shape = (2, LENGTH, HEADS, WIDTH // HEADS)
        self.register_buffer("keys", torch.zeros(shape), persistent=False)
        self.register_buffer("values", torch.zeros(shape), persistent=False)

    def forward(self, x, start, mask):
        batch, length, _ = x.shape
        parts = self.into(x).view(batch, length, 3, HEADS, -1)
        end = start + length
        self.keys[:batch, start:end] = parts[:, :, 1]
        self.values[:batch, start:end] = parts[:, :, 2]
        found = functional.scaled_dot_product_attention(
            parts[:, :, 0].transpose(1, 2),
            self.keys[:batch, :end].transpose(1, 2),
            self.values[:batch, :end].transpose(1, 2),
            attn_mask=mask,
        )
        return self.out(found.transpose(1, 2).reshape(batch, length, -1))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x, start, mask):
        x = x + self.attention(self.first(x), start, mask)
        return x + self.narrow(functional.silu(self.wide(self.second(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, 50, bias=False)

    @torch.inference_mode()
    def forward(self, tokens, start: int):
        length = tokens.shape[1]
        mask = None
        if length > 1:
            mask = torch.full((length, length), float("-inf"), device=tokens.device).triu(1)
            mask = torch.hstack([torch.zeros((length, start), device=tokens.device), mask])
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x, start, mask)
        return self.head(x).float()


class Entered(nn.Module):
    """Enters the mode inside of forward; what it made before has a history."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x):
        features = self.body(x)
        with torch.inference_mode(mode=True):
            scores = self.head(features.relu())
            kept = scores[:1], x.t()
        return features, scores, *kept


class Recorded(Entered):
    """Records gradients inside of a call that does not."""

    def forward(self, x):
        features = self.body(x)
        with torch.enable_grad():
            return features, self.head(features)


def kind(tensor):
    return torch.tensor([tensor.is_inference(), tensor.requires_grad])


path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = Transformer().to(device).eval()
results = {}
tokens = torch.randint(0, 50, (2, 6)).to(device)
start = 0
for step in range(8):
    logits = model(tokens, start)
    results[f"logits{step}"], results[f"kind{step}"] = logits.cpu().clone(), kind(logits)
    start += tokens.shape[1]
    tokens = logits[:, -1].argmax(-1, keepdim=True)
try:
    logits.add_(1)
except RuntimeError as error:
    results["refused"] = torch.tensor("inference tensor" in str(error))

entered = Entered().to(device)
for step in range(3):
    outputs = entered(torch.randn(4, WIDTH, device=device))
    for number, output in enumerate(outputs):
        results[f"entered{step}{number}"] = output.detach().cpu().clone()
        results[f"kind{step}{number}"] = kind(output)
outputs[0].square().sum().backward()
results["gradient"] = entered.body.weight.grad.cpu()

recorded = Recorded().to(device)
with torch.no_grad():
    outputs = recorded(torch.randn(4, WIDTH, device=device))
results["recorded"] = torch.stack([kind(output) for output in outputs])
outputs[1].square().sum().backward()
results["gradient of the head"] = recorded.head.weight.grad.cpu()
results["none of the body"] = torch.tensor(recorded.body.weight.grad is None)
torch.save(results, path)
