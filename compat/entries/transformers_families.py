"""Entries of the families of models that transformers has, each small, with random weights."""

from collections.abc import Iterator

from compat.entry import Entry

DECODERS = (
    "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text phi phi3 phimoe"
    " gpt2 gpt_neo gpt_neox gptj gpt_bigcode openai-gpt ctrl xlnet opt bloom falcon mpt codegen"
    " stablelm starcoder2 cohere cohere2 olmo olmo2 olmoe granite granitemoe glm glm4 deepseek_v2"
    " deepseek_v3 dots1 gpt_oss minimax jamba mamba mamba2 falcon_mamba bamba recurrent_gemma rwkv"
    " biogpt xglm persimmon nemotron smollm3 ernie4_5 exaone4 helium seed_oss lfm2 apertus arcee"
    " hunyuan_v1_dense nanochat diffllama doge"
)
ENCODERS = (
    "bert roberta albert electra deberta deberta-v2 distilbert mpnet camembert xlm-roberta xlm"
    " flaubert fnet convbert squeezebert mobilebert ibert longformer big_bird nystromformer"
    " roformer rembert layoutlm modernbert esm canine megatron-bert splinter data2vec-text"
    " ernie luke mra reformer eurobert markuplm"
)
TRANSLATORS = (
    "t5 mt5 umt5 bart mbart pegasus marian m2m_100 blenderbot blenderbot-small prophetnet led"
    " longt5 switch_transformers bigbird_pegasus nllb-moe plbart mvp pegasus_x fsmt"
)
PICTURES = (
    "vit deit beit swin swinv2 donut-swin convnext convnextv2 resnet regnet levit poolformer pvt"
    " pvt_v2 segformer mobilevit mobilevitv2 mobilenet_v1 mobilenet_v2 dinov2 dinov2_with_registers"
    " dinov3_vit focalnet cvt bit hiera ijepa vit_mae vit_msn dpt glpn yolos timesformer videomae"
    " vivit siglip_vision_model clip_vision_model swiftformer textnet data2vec-vision vitdet"
)
SOUNDS = (
    "wav2vec2 hubert wavlm unispeech unispeech-sat sew sew-d data2vec-audio wav2vec2-conformer"
    " wav2vec2-bert audio-spectrogram-transformer encodec dac"
)
JOINT = "clip siglip altclip chinese_clip clipseg owlvit vilt git blip llava paligemma vipllava"
WAYS_TO_GENERATE = (
    "plain sampled typical several beams sampled_beams static_cache own_static_cache"
    " quantity_of_scores no_cache processors stopping assisted prompt_lookup streamed continued"
    " padded embedded sliding_window reordered"
)
WAYS_OVER_CACHES = (
    "left_padded speculative looked_up static penalised contrasted shared_prompt cropped"
    " repeated_cache streamed_by_two gemma2_hybrid gemma3_sliding mistral_sliding mistral_static"
    " t5 t5_beams bart bart_beams whisper"
)
QUICK = {"own_static_cache"}


def transformers_entries() -> Iterator[Entry]:
    """One a family."""
    for program, families in {
        "causal_language_models": DECODERS,
        "language_encoders": ENCODERS,
        "sequence_models": TRANSLATORS,
        "picture_transformers": PICTURES,
        "sound_models": SOUNDS,
        "joint_models": JOINT,
        "generation": WAYS_TO_GENERATE,
        "texts_from_caches": WAYS_OVER_CACHES,
    }.items():
        for family in families.split():
            yield Entry(program, (family,), group="language", quick=family in QUICK)
