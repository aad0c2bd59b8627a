"""Image classification with resnet18, in plain PyTorch: a picture in, the best classes out.

The weights are random, with a fixed seed, unless the variable WEIGHTS names a file with a state
dictionary (such as torchvision's own for ImageNet).
"""

import base64
import binascii
import io
import json
import os

import torch
from PIL import Image, UnidentifiedImageError
from torchvision.models import resnet18
from torchvision.transforms.functional import center_crop, normalize, pil_to_tensor, resize

MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
device = "cuda" if torch.cuda.is_available() else "cpu"


def load():
    """The model, on the GPU where there is one."""
    torch.manual_seed(0)
    model = resnet18()
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
    """Takes the bytes of an image, or JSON: `image` in base64, or `pixels`, 3 rows of columns."""
    return handle_batch([event], context)[0]


def handle_batch(events, context):
    """The same for several calls, by one run; called where com.gpufaas.batch-handler says so."""
    answers = [None] * len(events)
    pictures = {}  # by the number of their call
    for number, event in enumerate(events):
        try:
            pictures[number] = picture_in(event)
        except (ValueError, TypeError, KeyError, UnidentifiedImageError, binascii.Error) as error:
            answers[number] = {"statusCode": 400, "body": {"error": f"send an image: {error}"}}
    if pictures:
        with torch.no_grad():
            chances = model(torch.stack(list(pictures.values())).to(device)).softmax(dim=1).cpu()
        for number, row in zip(pictures, chances, strict=True):
            answers[number] = {"statusCode": 200, "body": body_of(row)}
    return answers


def body_of(chances):
    """The answer to one picture."""
    best = chances.topk(5)
    classes = [
        {"class": int(number), "chance": round(float(chance), 6)}
        for chance, number in zip(best.values, best.indices, strict=True)
    ]
    return {"classes": classes, "device": device}


def picture_in(event):
    """The picture that was sent, as a normalised tensor of 3 x 224 x 224."""
    if event.headers.get("Content-Type", "").startswith("application/json"):
        sent = json.loads(event.body)
        if "pixels" in sent:
            pixels = torch.tensor(sent["pixels"], dtype=torch.float32)
            if pixels.dim() != 3 or pixels.shape[0] != 3:
                raise ValueError("pixels are 3 x height x width, from 0 to 1")
            return prepared(pixels)
        content = base64.b64decode(sent["image"], validate=True)
    else:
        content = event.body
    image = Image.open(io.BytesIO(content)).convert("RGB")
    return prepared(pil_to_tensor(image).float() / 255)


def prepared(pixels):
    """As ImageNet's models want it."""
    return normalize(
        center_crop(resize(pixels, [256], antialias=True), [224, 224]), MEAN, DEVIATION
    )
