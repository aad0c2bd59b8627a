"""A pipeline of two models in one function: a detector finds boxes, a classifier names them.

Weights are random, with a fixed seed, unless WEIGHTS names a file with `detector` and `classifier`.
"""

import json
import os

import torch
from torch.nn.functional import interpolate

from .models import Classifier, Detector

SIDE, CROP = 128, 64
device = "cuda" if torch.cuda.is_available() else "cpu"


def load():
    """Both models, on the GPU where there is one."""
    torch.manual_seed(0)
    detector, classifier = Detector(), Classifier()
    if os.environ.get("WEIGHTS"):
        weights = torch.load(
            os.environ["WEIGHTS"],
            map_location="cpu",
            weights_only=True,
        )
        detector.load_state_dict(weights["detector"])
        classifier.load_state_dict(weights["classifier"])
    return detector.eval().to(device), classifier.eval().to(device)


detector, classifier = load()


def handle(event, context):
    """Takes JSON: `pixels` (3 rows of columns), or a `seed` for a made-up picture; `boxes` (3)."""
    try:
        picture, count = picture_in(event.body)
    except (ValueError, TypeError) as error:
        return {"statusCode": 400, "body": {"error": str(error)}}
    with torch.no_grad():
        sure, boxes = best_boxes(detector(picture.to(device)).cpu(), count)
        crops = torch.cat([cut(picture, box) for box in boxes])
        classes = classifier(crops.to(device)).argmax(dim=1).cpu()
    found = [
        {
            "box": [round(float(edge), 4) for edge in box],
            "sure": round(float(one), 4),
            "class": int(c),
        }
        for one, box, c in zip(sure, boxes, classes, strict=True)
    ]
    return {"statusCode": 200, "body": {"found": found, "device": device}}


def picture_in(body):
    """A picture of 1 x 3 x SIDE x SIDE, and how many boxes are wanted."""
    said = json.loads(body or b"{}")
    if not isinstance(said, dict):
        raise TypeError("JSON with names and values is wanted")
    count = int(said.get("boxes", 3))
    if not 1 <= count <= 16:
        raise ValueError("boxes are 1 to 16")
    if "pixels" not in said:
        made_up = torch.Generator().manual_seed(int(said.get("seed", 0)))
        return torch.rand(1, 3, SIDE, SIDE, generator=made_up), count
    pixels = torch.tensor(said["pixels"], dtype=torch.float32)
    if pixels.dim() != 3 or pixels.shape[0] != 3:
        raise ValueError("pixels are 3 x height x width, from 0 to 1")
    return interpolate(pixels[None], size=(SIDE, SIDE), mode="bilinear"), count


def best_boxes(grid, count):
    """How sure, and left, top, right, bottom, of the fields that are surest."""
    fields = grid[0].flatten(1)
    sure, numbers = fields[0].topk(count)
    columns = grid.shape[3]
    centres = torch.stack([numbers % columns, numbers // columns], dim=1) / columns
    reach = fields[3:5, numbers].t() / 2 + CROP / SIDE / 8
    middle = centres + fields[1:3, numbers].t() / columns
    return sure, torch.cat([middle - reach, middle + reach], dim=1).clamp(0, 1)


def cut(picture, box):
    """What is in a box, as large as the classifier wants it."""
    left, top, right, bottom = (int(edge * SIDE) for edge in box)
    part = picture[
        :, :, min(top, SIDE - 2) : max(bottom, top + 2), min(left, SIDE - 2) : max(right, left + 2)
    ]
    return interpolate(part, size=(CROP, CROP), mode="bilinear")
