"""Works on text with transformers and accelerate as their guides do: RECIPE."""

import sys
import tempfile
import threading
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch
from torch.utils.data import DataLoader, Dataset
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    T5Config,
    Trainer,
    TrainingArguments,
)

path, recipe = sys.argv[1], sys.argv[2]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
results = {}
LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
BERT = BertConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    num_labels=3,
)
T5 = T5Config(
    vocab_size=64,
    d_model=32,
    d_ff=48,
    d_kv=8,
    num_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
)


def note(name, value):
    results[name] = value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def tokens(*shape):
    return torch.randint(3, 64, shape).to(device)


class Rows(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        row = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 64, (8,), generator=row)
        return {"input_ids": ids, "attention_mask": torch.ones(8).long(), "labels": index % 3}


def trained_by_trainer():
    model = AutoModelForSequenceClassification.from_config(BERT)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            max_steps=3,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            seed=1,
            dataloader_pin_memory=True,
        )
        trainer = Trainer(model, options, train_dataset=Rows(), eval_dataset=Rows())
        note("loss", trainer.train().training_loss)
        note("evaluated", trainer.evaluate()["eval_loss"])
        note("predicted", torch.from_numpy(trainer.predict(Rows()).predictions))


def accelerated():
    accelerator = Accelerator()
    model = AutoModelForSequenceClassification.from_config(BERT)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loader = DataLoader(Rows(), batch_size=4, shuffle=False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    note("loss", loss)
    note("gathered", accelerator.gather_for_metrics(model.eval()(**batch).logits))
    note("weight", accelerator.unwrap_model(model).classifier.weight)


def dispatched():
    model = AutoModelForCausalLM.from_config(LLAMA)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with init_empty_weights():
            empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        empty.tie_weights()
        where = 0 if device == "cuda" else "cpu"
        loaded = load_checkpoint_and_dispatch(
            empty, str(Path(folder) / "model.safetensors"), device_map={"": where}
        )
        ids = tokens(2, 7)
        with torch.no_grad():
            note("loaded", loaded.eval()(ids).logits)
        again = AutoModelForCausalLM.from_pretrained(
            folder, device_map="auto" if device == "cuda" else None, dtype=torch.bfloat16
        )
        with torch.no_grad():
            note("again", again.eval()(ids).logits)


def pooled_sentences():
    model = AutoModel.from_config(BERT).to(device).eval()
    mask = torch.ones(3, 9, dtype=torch.long, device=device)
    mask[1, 5:], mask[2, 3:] = 0, 0
    with torch.inference_mode():
        hidden = model(input_ids=tokens(3, 9), attention_mask=mask).last_hidden_state
        wide = mask.unsqueeze(-1).float()
        pooled = F.normalize((hidden * wide).sum(1) / wide.sum(1).clamp(min=1e-9), dim=1)
        note("likeness", pooled @ pooled.T)
        note("cls", hidden[:, 0])
        full = model(tokens(2, 6), output_hidden_states=True)
        note("states", torch.stack(full.hidden_states[-2:]).mean(0))


class NoRepeat(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids, -float("inf"))


class Stop(StoppingCriteria):
    def __call__(self, input_ids, scores, **options):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] > 12, device=input_ids.device)


def steered_generation():
    model = AutoModelForCausalLM.from_config(LLAMA).to(device).eval()
    found = model.generate(
        tokens(2, 4),
        max_new_tokens=20,
        do_sample=False,
        stopping_criteria=[Stop()],
        logits_processor=LogitsProcessorList([NoRepeat()]),
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
    )
    note("sequences", found.sequences)
    note("scores", found.scores[-1].clamp(min=-100))
    note(
        "transition",
        model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True),
    )
    torch.manual_seed(1)
    note(
        "sampled",
        model.generate(
            tokens(2, 4),
            max_new_tokens=8,
            do_sample=True,
            top_k=10,
            top_p=0.9,
            temperature=0.7,
            repetition_penalty=1.2,
            no_repeat_ngram_size=2,
            min_new_tokens=3,
            num_return_sequences=2,
        ),
    )


def beams_and_groups():
    model = AutoModelForSeq2SeqLM.from_config(T5).to(device).eval()
    ids = tokens(2, 6)
    note("greedy", model.generate(ids, max_new_tokens=6))
    note("beams", model.generate(ids, max_new_tokens=6, num_beams=3, num_return_sequences=2))
    note("penalised", model.generate(ids, max_new_tokens=6, num_beams=2, length_penalty=0.5))
    encoded = model.get_encoder()(ids)
    with torch.no_grad():
        note("decoded", model(encoder_outputs=encoded, decoder_input_ids=ids[:, :3]).logits)


def beam_by_hand():
    model = AutoModelForCausalLM.from_config(LLAMA).to(device).eval()
    beams = [(0.0, [1, 5])]
    with torch.no_grad():
        for _ in range(4):
            grown = []
            for score, ids in beams:
                logits = model(torch.tensor([ids], device=device)).logits[0, -1]
                top = F.log_softmax(logits, -1).topk(3)
                for value, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                    grown.append((score + value, [*ids, token]))
            beams = sorted(grown, reverse=True)[:3]
    note("beams", [ids for _, ids in beams])
    note("scores", [round(score, 3) for score, _ in beams])


def cached_by_hand():
    model = AutoModelForCausalLM.from_config(LLAMA).to(device).eval()
    ids, past = tokens(1, 5), None
    answer = []
    with torch.inference_mode():
        for _ in range(6):
            out = model(ids, past_key_values=past, use_cache=True)
            past, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            answer.append(ids.item())
    note("answer", answer)
    note("length", past.get_seq_length())
    note("keys", past.layers[0].keys)


def perplexity():
    model = AutoModelForCausalLM.from_config(LLAMA).to(device).eval()
    ids, losses = tokens(1, 40), []
    for begin in range(0, 40, 10):
        window = ids[:, max(0, begin - 5) : begin + 10]
        target = window.clone()
        target[:, :-10] = -100
        with torch.no_grad():
            losses.append(model(window, labels=target).loss)
    note("perplexity", torch.exp(torch.stack(losses).mean()))


def streamed():
    class Streamer:
        def __init__(self):
            self.parts = []

        def put(self, value):
            self.parts.append(value.cpu().flatten().tolist())

        def end(self):
            self.parts.append("end")

    model = AutoModelForCausalLM.from_config(LLAMA).to(device).eval()
    streamer = Streamer()
    options = {
        "input_ids": tokens(1, 4),
        "max_new_tokens": 6,
        "do_sample": False,
        "streamer": streamer,
    }
    thread = threading.Thread(target=model.generate, kwargs=options)
    thread.start()
    thread.join()
    note("parts", streamer.parts)


def new_words():
    model = AutoModelForCausalLM.from_config(LLAMA).to(device).eval()
    ids = tokens(1, 5)
    with torch.no_grad():
        note("before", model(ids).logits)
        model.resize_token_embeddings(70, mean_resizing=False)
        note("after", model(ids).logits[..., :64])
        model.get_input_embeddings().weight[64:] = 0.1
        model.get_output_embeddings().weight[64:] = 0.1
        note("new", model(torch.full((1, 3), 66, device=device)).logits)
        note("embedded", model(inputs_embeds=model.get_input_embeddings()(ids)).logits)


def attention_ways():
    ids = tokens(2, 6)
    for way in ("eager", "sdpa"):
        torch.manual_seed(2)
        model = AutoModelForCausalLM.from_config(LLAMA, attn_implementation=way)
        model = model.to(device).eval()
        with torch.no_grad():
            found = model(ids, output_attentions=way == "eager")
        note(way, found.logits)
        if way == "eager":
            note("attentions", torch.stack(found.attentions))
    model.gradient_checkpointing_enable()
    model.train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    note("gradient", model.lm_head.weight.grad)


def halves():
    model = AutoModelForCausalLM.from_config(LLAMA).to(device).eval()
    ids = tokens(2, 6)
    with torch.no_grad():
        note("bfloat", model.to(torch.bfloat16)(ids).logits)
        note("half", model.half()(ids).logits)
        note("float", model.float()(ids).logits)
        model.set_attn_implementation("eager")
        note("eager", model(ids).logits)


globals()[recipe]()
torch.save(results, path)
