"""The pipeline API with device=0, a tokenizer made on the spot and random weights."""

import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    pipeline,
)

WORDS = "the a film was good bad long short very not and but i liked hated it".split()

path = sys.argv[1]
torch.manual_seed(0)
vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
config = BertConfig(
    vocab_size=len(vocabulary),
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
)
model = BertForSequenceClassification(config).eval()
classify = pipeline(
    "text-classification",
    model=model,
    tokenizer=tokenizer,
    device=0 if torch.cuda.is_available() else -1,
)

results = {}
for call, text in enumerate(["the film was good", "i hated it", "a very long film but not bad"]):
    answer = classify(text)[0]
    results[f"label{call}"] = answer["label"]
    results[f"score{call}"] = answer["score"]
several = classify(["it was short", "a good and very very long film"], batch_size=2, top_k=None)
results["several"] = [[entry["score"] for entry in answers] for answers in several]
results["type"] = classify.model.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
torch.save(results, path)
