"""Models of pictures and words together, small, of a family of transformers: FAMILY."""

import sys
import time

import torch
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

path, family = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
BOTH = {"text_config": TEXT, "vision_config": VISION}
DECODER = TEXT | {"model_type": "llama", "num_key_value_heads": 2}
SIGHT = VISION | {"model_type": "clip_vision_model"}
PICTURE_TOKEN = 5
CHATTING = {
    "llava": {
        "text_config": DECODER,
        "vision_config": SIGHT,
        "image_token_index": PICTURE_TOKEN,
        "image_token_id": PICTURE_TOKEN,
    },
    "paligemma": {
        "text_config": TEXT | {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 8},
        "vision_config": VISION | {"model_type": "siglip_vision_model", "projection_dim": 32},
        "image_token_id": PICTURE_TOKEN,
        "image_token_index": PICTURE_TOKEN,
        "projection_dim": 32,
    },
    "vipllava": {
        "text_config": DECODER,
        "vision_config": SIGHT,
        "vision_feature_layers": [-1, -2],
        "image_token_index": PICTURE_TOKEN,
        "image_token_id": PICTURE_TOKEN,
    },
}
OWN = {
    "clip": BOTH | {"projection_dim": 16},
    "siglip": BOTH,
    "altclip": {
        "text_config": TEXT | {"project_dim": 16},
        "vision_config": VISION,
        "projection_dim": 16,
    },
    "chinese_clip": BOTH | {"projection_dim": 16},
    "clipseg": BOTH | {"projection_dim": 16},
    "owlvit": BOTH | {"projection_dim": 16},
    "vilt": TEXT | {"image_size": 32, "patch_size": 8},
    "git": TEXT | {"vision_config": VISION},
    "blip": BOTH | {"projection_dim": 16},
}
tokens = torch.randint(6, 128, (2, 8))
if family in CHATTING:
    config = AutoConfig.for_model(family, **CHATTING[family])
    model = AutoModelForImageTextToText.from_config(config)
    places = 16
    tokens = torch.cat([torch.full((2, places), PICTURE_TOKEN), tokens], dim=1)
else:
    model = AutoModel.from_config(AutoConfig.for_model(family, **OWN[family]))
model = model.eval().to(device)


def answer():
    """What the model makes of new pictures and words."""
    pictures = torch.rand(2, 3, 32, 32).to(device)
    given = {"input_ids": tokens.to(device), "pixel_values": pictures}
    if family == "paligemma":  # as its processor does; without it eager attends to all
        given["token_type_ids"] = torch.zeros_like(given["input_ids"])
    output = model(**given, attention_mask=torch.ones_like(given["input_ids"]))
    for name in ("logits_per_image", "logits", "last_hidden_state"):
        found = getattr(output, name, None)
        if found is not None:
            return found.cpu()
    return output[0].cpu()


results = {}
with torch.no_grad():
    start = time.perf_counter()
    results["first"] = answer()
    print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
    for call in range(2):
        results[f"answer{call}"] = answer()
torch.save(results, path)
