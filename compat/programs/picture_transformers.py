"""Looks at random pictures with a small model of a family of transformers: FAMILY."""

import sys
import time

import torch
from transformers import AutoConfig, AutoModel

path, family = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 16,
    "tubelet_size": 2,
    "num_frames": 4,
    "depths": [1, 1, 1, 1],
}
SWIN = {
    "embed_dim": 16,
    "depths": [1, 1],
    "num_heads": [2, 4],
    "patch_size": 4,
    "window_size": 4,
}
OWN = {
    "swin": SWIN,
    "swinv2": SWIN,
    "donut-swin": SWIN,
    "convnext": {"hidden_sizes": [8, 16, 24, 32], "patch_size": 4},
    "convnextv2": {"hidden_sizes": [8, 16, 24, 32], "patch_size": 4},
    "dinov2": {"patch_size": 16},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "layer_type": "basic"},
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "groups_width": 8},
    "bit": {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "num_groups": 4},
    "poolformer": {"hidden_sizes": [8, 16, 24, 32], "patch_size": 7},
    "segformer": {"hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 1, 2, 2]},
    "pvt": {"hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 1, 2, 2]},
    "pvt_v2": {"hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 1, 2, 2]},
    "glpn": {"hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 1, 2, 2]},
    "cvt": {"embed_dim": [8, 16, 24], "num_heads": [1, 2, 3], "depth": [1, 2, 3]},
    "mobilevit": {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [4, 8, 8, 16, 24, 32, 40]},
    "focalnet": {"embed_dim": 8, "patch_size": 4, "hidden_sizes": [8, 16, 24, 32]},
    "levit": {"num_attention_heads": [2, 3, 4], "patch_size": 16, "depths": [1, 1, 1]},
    "hiera": {
        "image_size": [64, 64],
        "embed_dim": 8,
        "num_heads": [1, 1, 2, 2],
        "patch_size": [7, 7],
    },
    "mobilevitv2": {"patch_size": 2},
    "swiftformer": {"embed_dims": [8, 16, 24, 32]},
    "vit_mae": {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "mask_ratio": 0.0},
    "yolos": {"image_size": [64, 64], "num_detection_tokens": 5},
    "timesformer": {"num_frames": 4},
    "vivit": {"tubelet_size": [2, 16, 16]},
}
VIDEO = {"timesformer", "videomae", "vivit"}

torch.manual_seed(0)
known = AutoConfig.for_model(family).to_dict()
small = {name: value for name, value in SMALL.items() if name in known}
config = AutoConfig.for_model(family, **(small | OWN.get(family, {})))
model = AutoModel.from_config(config).eval().to(device)
shape = (2, 4, 3, 64, 64) if family in VIDEO else (2, 3, 64, 64)


def look():
    """What the model sees on new pictures."""
    torch.manual_seed(1)
    pictures = torch.rand(shape).to(device)
    return model(pixel_values=pictures)[0].cpu()


results = {}
with torch.inference_mode():
    start = time.perf_counter()
    results["first"] = look()
    print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
    for call in range(3):
        results[f"seen{call}"] = look()
    start = time.perf_counter()
    for _ in range(3):
        look()
    print(f"{(time.perf_counter() - start) / 3 * 1000:.2f} ms a call")
torch.save(results, path)
