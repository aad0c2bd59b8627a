"""Reconstructs pictures with a variational autoencoder, noise drawn on the device."""

import sys

import torch
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self, latent=16):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 4, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, 4, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.Flatten(),
        )
        self.mean = nn.Linear(32 * 7 * 7, latent)
        self.spread = nn.Linear(32 * 7 * 7, latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, 32 * 7 * 7),
            nn.Unflatten(1, (32, 7, 7)),
            nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
            nn.Sigmoid(),
        )

    def forward(self, x):
        h = self.encoder(x)
        mean, spread = self.mean(h), self.spread(h)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * spread)
        return self.decoder(z), mean, spread


path = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = Autoencoder().to(device).eval()

results = {}
for call in range(3):
    torch.manual_seed(call)
    with torch.no_grad():
        drawn, mean, spread = model(torch.rand(4, 1, 28, 28, device=device))
    results[f"drawn{call}"] = drawn.cpu()
    results[f"mean{call}"] = mean.cpu()
    results[f"spread{call}"] = spread.cpu()
torch.save(results, path)
