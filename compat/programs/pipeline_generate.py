"""Text generation by the pipeline API on the default device."""

import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, pipeline

WORDS = [f"word{number}" for number in range(60)]

path = sys.argv[1]
torch.manual_seed(0)
vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[EOS]", *WORDS])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]"
)
config = GPT2Config(
    vocab_size=len(vocabulary),
    n_positions=64,
    n_embd=64,
    n_layer=2,
    n_head=4,
    bos_token_id=2,
    eos_token_id=2,
    pad_token_id=0,
)
device = "cuda:0" if torch.cuda.is_available() else "cpu"
generate = pipeline(
    "text-generation", model=GPT2LMHeadModel(config).eval(), tokenizer=tokenizer, device=device
)

results = {}
for call, text in enumerate(["word1 word5", "word7 word9 word11", "word3"]):
    answer = generate(text, max_new_tokens=6, do_sample=False)
    results[f"text{call}"] = answer[0]["generated_text"]
torch.save(results, path)
