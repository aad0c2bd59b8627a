"""Encodes a padded batch of texts with a small encoder of a family of transformers: FAMILY."""

import sys
import time

import torch
from transformers import AutoConfig, AutoModel

path, family = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 160
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "d_model": 64,
    "dim": 64,
    "emb_dim": 64,
    "embedding_size": 64,
    "intermediate_size": 128,
    "hidden_dim": 128,
    "d_inner": 128,
    "num_hidden_layers": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "n_heads": 4,
    "n_head": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "attention_window": [8, 8],
}
OWN = {
    "albert": {"num_hidden_groups": 1},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "mobilebert": {"intra_bottleneck_size": 32, "true_hidden_size": 32},
    "nystromformer": {"num_landmarks": 16, "segment_means_seq_len": 16},
    "big_bird": {"attention_type": "original_full"},
    "esm": {"mask_token_id": 3},
    "canine": {"local_transformer_stride": 16, "num_hash_buckets": 64},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 8},
    "layoutlm": {"max_2d_position_embeddings": 32},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [32, 32],
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
        "num_hashes": 2,
        "num_buckets": 4,
        "is_decoder": False,
        "hash_seed": 0,
    },
}

torch.manual_seed(0)
known = AutoConfig.for_model(family).to_dict()
small = {name: value for name, value in SMALL.items() if name in known}
config = AutoConfig.for_model(family, **(small | OWN.get(family, {})))
model = AutoModel.from_config(config).eval().to(device)
takes_mask = family != "fnet"


def encode(length):
    """The last hidden states of two texts, the second of which is shorter."""
    tokens = torch.randint(4, VOCABULARY, (2, length))
    mask = torch.ones_like(tokens)
    tokens[1, length - 4 :] = 0
    mask[1, length - 4 :] = 0
    given = {"attention_mask": mask.to(device)} if takes_mask else {}
    return model(tokens.to(device), **given)[0].cpu()


results = {}
with torch.no_grad():
    start = time.perf_counter()
    results["first"] = encode(16)
    print(f"{(time.perf_counter() - start) * 1000:.2f} ms to the first answer")
    for call in range(3):
        results[f"encoded{call}"] = encode(16)
    start = time.perf_counter()
    for _ in range(3):
        encode(16)
    print(f"{(time.perf_counter() - start) / 3 * 1000:.2f} ms a call")
torch.save(results, path)
