"""A classifier class around a DenseNet: MODEL BATCH."""

import sys
import time

import torch
import torchvision.models as models
from torch import nn


class Classifier(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))

    @property
    def device(self):
        return next(self.parameters()).device

    @torch.no_grad()
    def predict(self, pictures):
        logits = self(pictures.to(self.device, non_blocking=True))
        return logits, logits.softmax(dim=-1).max(dim=-1)

    def forward(self, pictures):
        return self.backbone((pictures - self.mean) / self.std)


path, name, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
classifier = Classifier(models.get_model(name)).to(device).eval()
size = 224 if batch == 1 else 64

results = {}
for call in range(3):
    start = time.perf_counter()
    pictures = torch.rand(batch, 3, size, size)
    logits, best = classifier.predict(pictures)
    results[f"logits{call}"] = logits.cpu()
    if call == 0:
        print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
    results[f"confidence{call}"] = best.values.cpu()
    results[f"class{call}"] = best.indices.tolist()

start = time.perf_counter()
for _ in range(3):
    classifier.predict(pictures)[0].cpu()
print(f"{(time.perf_counter() - start) / 3 * 1000:.2f} ms a call")
torch.save(results, path)
