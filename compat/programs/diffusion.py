"""Draws pictures from noise: a U-Net with attention and time embeddings, and a DDPM loop."""

import math
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 10


def embed_time(steps, width):
    rates = torch.exp(
        -math.log(10000) * torch.arange(width // 2, device=steps.device) / (width // 2)
    )
    angles = steps.float()[:, None] * rates[None]
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Residual(nn.Module):
    def __init__(self, inside, outside, time_width):
        super().__init__()
        self.norm1 = nn.GroupNorm(8, inside)
        self.conv1 = nn.Conv2d(inside, outside, 3, padding=1)
        self.time = nn.Linear(time_width, outside)
        self.norm2 = nn.GroupNorm(8, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x, moment):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(moment))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, width)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x):
        batch, width, rows, columns = x.shape
        q, k, v = (
            self.qkv(self.norm(x))
            .reshape(batch, 3, self.heads, width // self.heads, rows * columns)
            .transpose(-1, -2)
            .unbind(1)
        )
        seen = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(seen.transpose(-1, -2).reshape(batch, width, rows, columns))


class UNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 64), nn.SiLU(), nn.Linear(64, 64))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([Residual(width, width, 64), Residual(width, 2 * width, 64)])
        self.shrink = nn.ModuleList(
            [nn.Conv2d(w, w, 3, stride=2, padding=1) for w in (width, 2 * width)]
        )
        self.middle = nn.ModuleList([Residual(2 * width, 2 * width, 64), Attention(2 * width)])
        self.up = nn.ModuleList([Residual(4 * width, width, 64), Residual(2 * width, width, 64)])
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, steps):
        moment = self.time(embed_time(steps, self.width))
        x = self.first(x)
        kept = []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x = block(x, moment)
            kept.append(x)
            x = shrink(x)
        x = self.middle[1](self.middle[0](x, moment))
        for block in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = block(torch.cat([x, kept.pop()], dim=1), moment)
        return self.last(F.silu(x))


path = sys.argv[1]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = UNet().to(device).eval()
betas = torch.linspace(1e-4, 0.02, STEPS, device=device)
alphas = torch.cumprod(1 - betas, dim=0)


@torch.no_grad()
def draw(count, generator):
    x = torch.randn(count, 3, 32, 32, generator=generator).to(device)
    for step in reversed(range(STEPS)):
        steps = torch.full((count,), step, device=device, dtype=torch.long)
        noise = model(x, steps)
        share = betas[step] / torch.sqrt(1 - alphas[step])
        mean = (x - share * noise) / torch.sqrt(1 - betas[step])
        fresh = torch.randn(x.shape, generator=generator).to(device)
        x = mean + (torch.sqrt(betas[step]) * fresh if step else 0)
    return x.clamp(-3, 3)


results = {}
for call in range(3):
    results[f"pictures{call}"] = draw(2, torch.Generator().manual_seed(call)).cpu()
start = time.perf_counter()
draw(2, torch.Generator().manual_seed(0))
print(f"{(time.perf_counter() - start) * 1000:.2f} ms a call")
torch.save(results, path)
