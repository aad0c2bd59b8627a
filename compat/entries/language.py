"""Entries of models of language and speech, most of them of transformers."""

from collections.abc import Iterator

from compat.entry import Entry


def language_entries() -> Iterator[Entry]:
    yield Entry("bert_classify", quick=True, group="language")
    for program in (
        "bert_embeddings",
        "roberta_tokens",
        "distilbert_answers",
        "t5_translate",
        "gpt2_sampled",
        "whisper_transcribe",
        "clip_zero_shot",
        "vit_transformers",
        "llama_chat",
        "pipeline_classify",
        "pipeline_generate",
        "device_map",
        "from_pretrained",
        "lstm_text",
        "gru_tagger",
        "packed_sequences",
        "embedding_bags",
    ):
        yield Entry(program, group="language")
    for family in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "jamba"):
        yield Entry("moe_language_models", (family,), group="language")
    yield Entry("gpt2_greedy", quick=True, group="language")
    yield Entry("padded_transformers", quick=True, group="language")
    yield Entry("lstm_carried_state", quick=True, group="language")
