"""Detects objects, as many as there happen to be, in pictures of several sizes: MODEL."""

import sys

import torch
from torchvision.models import detection

path, name = sys.argv[1], sys.argv[2]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
options = {"weights": None, "weights_backbone": None, "num_classes": 5}
if "rcnn" in name:
    options |= {"box_score_thresh": 0.1, "box_detections_per_img": 20, "min_size": 160}
elif name.startswith("ssd"):
    options |= {"score_thresh": 0.1, "detections_per_img": 20}
else:
    options |= {"score_thresh": 0.001, "detections_per_img": 20, "min_size": 160}
model = getattr(detection, name)(**options).to(device)

# Untrained batch norms would let activations vanish or explode: let them see two pictures.
for layer in model.modules():
    if isinstance(layer, torch.nn.BatchNorm2d):
        layer.momentum = None
target = {
    "boxes": torch.tensor([[10.0, 10.0, 90.0, 80.0]], device=device),
    "labels": torch.tensor([1], device=device),
    "masks": torch.ones(1, 160, 160, dtype=torch.uint8, device=device),
}
with torch.no_grad():
    model.train()(list(torch.rand(2, 3, 160, 160).to(device)), [target, target])
model.eval()

results = {}
for call, sizes in enumerate([[(160, 200)], [(160, 200), (140, 150)], [(150, 170)], [(160, 200)]]):
    pictures = [torch.rand(3, height, width).to(device) for height, width in sizes]
    with torch.no_grad():
        found = model(pictures)
    for index, objects in enumerate(found):
        for key, value in objects.items():
            results[f"{call}.{index}.{key}"] = value.cpu()
        results[f"{call}.{index}.count"] = len(objects["boxes"])
torch.save(results, path)
