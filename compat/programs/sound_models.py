"""Listens to a tone with a small model of a family of transformers: FAMILY."""

import sys
import time

import torch
from transformers import AutoConfig, AutoModel

path, family = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 3,
}
OWN = {
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32},
    "sew-d": {"position_buckets": 16, "max_position_embeddings": 64, "squeeze_factor": 2},
    "sew": {"squeeze_factor": 2},
    "encodec": {
        "num_filters": 4,
        "hidden_size": 16,
        "codebook_size": 32,
        "upsampling_ratios": [4, 2],
    },
    "dac": {"encoder_hidden_size": 8, "decoder_hidden_size": 64, "n_codebooks": 2},
    "wav2vec2-bert": {"feature_projection_input_dim": 32},
}
SPECTRA = {"audio-spectrogram-transformer": (1, 64, 32), "wav2vec2-bert": (1, 24, 32)}

torch.manual_seed(0)
known = AutoConfig.for_model(family).to_dict()
small = {name: value for name, value in SMALL.items() if name in known}
config = AutoConfig.for_model(family, **(small | OWN.get(family, {})))
model = AutoModel.from_config(config).eval().to(device)


def listen(pitch):
    """What the model hears of a tone."""
    if family in SPECTRA:
        return model(torch.rand(SPECTRA[family]).to(device))[0].cpu()
    tone = torch.sin(torch.arange(1600) * pitch).unsqueeze(0)
    tone = tone.unsqueeze(0) if family in {"encodec", "dac"} else tone
    return model(tone.to(device))[0].cpu()


results = {}
with torch.inference_mode():
    start = time.perf_counter()
    results["first"] = listen(0.1)
    print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
    for call in range(3):
        results[f"heard{call}"] = listen(0.2 + 0.1 * call)
    start = time.perf_counter()
    for _ in range(3):
        listen(0.3)
    print(f"{(time.perf_counter() - start) / 3 * 1000:.2f} ms a call")
torch.save(results, path)
