"""The programs of the compatibility suite: what to run, with which arguments, and how close."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True, slots=True)
class Entry:
    """One program with its arguments, and what is promised about it."""

    program: str
    args: tuple[str, ...] = ()
    quick: bool = False  # runs in `make test`; the others in `make compat`
    has_model: bool = True
    loosen: float = 1.0  # multiplies the tolerance of every dtype
    refusal: str | None = None  # it may refuse, with these words

    @property
    def name(self) -> str:
        """What the table and the tests call it."""
        return " ".join((self.program, *self.args))

    @property
    def path(self) -> Path:
        """The file of the program."""
        return PROGRAMS / f"{self.program}.py"


# Table 1 of the thesis: its 22 models, by the names that torchvision gives them.
TABLE_1 = {
    "squeezenet": ("squeezenet1_1", "squeezenet1_0"),
    "resnet": ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    "alexnet": ("alexnet",),
    "resnext": ("resnext50_32x4d", "resnext101_32x8d"),
    "densenet": ("densenet121", "densenet161", "densenet169", "densenet201"),
    "inception": ("inception_v3",),
    "vgg": ("vgg11", "vgg13", "vgg16", "vgg16_bn", "vgg19"),
    "wide_resnet": ("wide_resnet50_2", "wide_resnet101_2"),
}
QUICK_OF_TABLE_1 = {("resnet18", 32), ("squeezenet1_1", 32), ("densenet121", 32)}

WAYS_TO_CHANGE_WEIGHTS = (
    ("in_place", "detached", "out_argument", "foreach", "initialised"),
    ("data_in_place", "kept_view", "data_view", "data_element", "data_assigned"),
    ("loaded", "copied_back", "applied", "vector"),
    ("optimised", "replaced", "swapped"),
)


def _table_1() -> Iterator[Entry]:
    for program, models in TABLE_1.items():
        for model in models:
            for batch in (1, 32):
                quick = (model, batch) in QUICK_OF_TABLE_1
                yield Entry(program, (model, str(batch)), quick=quick)


def _vision() -> Iterator[Entry]:
    for model in ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
        yield Entry("segmentation", (model,))
    for model in (
        "fasterrcnn_resnet50_fpn",
        "maskrcnn_resnet50_fpn",
        "retinanet_resnet50_fpn",
        "ssdlite320_mobilenet_v3_large",
        "fcos_resnet50_fpn",
    ):
        yield Entry("detection", (model,))
    for model in ("r3d_18", "mc3_18", "swin3d_t"):
        yield Entry("video_clips", (model,))
    for model, size in {
        "vit_b_16": 224,
        "swin_t": 96,
        "convnext_tiny": 96,
        "mobilenet_v3_small": 96,
        "efficientnet_b0": 96,
        "regnet_y_400mf": 96,
        "shufflenet_v2_x1_0": 96,
        "googlenet": 96,
        "maxvit_t": 224,
    }.items():
        yield Entry("vision_models", (model, str(size)))
    yield Entry("optical_flow")
    for model, size in {
        "efficientnet_lite0": 96,
        "mixer_s32_224": 224,
        "deit_tiny_patch16_224": 224,
        "convnextv2_atto": 96,
        "mobilevit_xxs": 96,
        "resnest14d": 96,
    }.items():
        yield Entry("timm_models", (model, str(size)))
    yield Entry("diffusion")
    yield Entry("autoencoder")


def _language() -> Iterator[Entry]:
    yield Entry("bert_classify", quick=True)
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
        yield Entry(program)
    yield Entry("gpt2_greedy", quick=True)
    yield Entry("lstm_carried_state", quick=True)


def _custom_modules() -> Iterator[Entry]:
    for program in ("control_flow", "inplace_updates", "hooks", "structured_data"):
        yield Entry(program, quick=True)
    for program in (
        "early_exit",
        "aliased_outputs",
        "running_buffers",
        "shared_weights",
        "submodule_calls",
        "nested_models",
        "mixture_of_experts",
        "changing_shapes",
        "key_value_cache",
        "graph_network",
        "audio_spectra",
        "custom_function",
        "dropout_seeded",
        "exceptions",
        "lazy_and_meta",
        "functional_calls",
    ):
        yield Entry(program)


def _precision_and_training() -> Iterator[Entry]:
    yield Entry("input_gradients", quick=True)
    for program in (
        "half_precision",
        "bfloat16_model",
        "autocast_mixed",
        "channels_last",
        "double_and_complex",
        "mixed_training",
        "weight_averaging",
    ):
        yield Entry(program)
    for optimizer in ("Adam", "SGD", "RMSprop"):
        yield Entry("training_steps", (optimizer,))


def _changes() -> Iterator[Entry]:
    for ways in WAYS_TO_CHANGE_WEIGHTS:
        yield Entry("changed_weights", ways, quick="kept_view" in ways)
    for program in (
        "changed_buffers",
        "changed_hooks",
        "changed_modes",
        "changed_modules",
        "changed_inputs",
        "edited_state",
    ):
        yield Entry(program)
    yield Entry("changed_attributes", quick=True)


def _surroundings() -> Iterator[Entry]:
    for program in ("threaded_requests", "device_queries", "save_and_load"):
        yield Entry(program, quick=True)
    for program in (
        "script_module",
        "traced_module",
        "data_loading",
        "safetensors_files",
        "streams_and_events",
        "default_device",
        "several_models",
        "thread_pool",
        "asyncio_requests",
        "forked_processes",
        "queued_process",
        "data_parallel",
        "raw_memory",
    ):
        yield Entry(program)
    for program in ("random_numbers", "tensor_arithmetic"):
        yield Entry(program, has_model=False)
    for way in ("module", "method", "function", "graphs"):
        yield Entry("compiled_model", (way,))
    for method in ("fork", "spawn", "forkserver"):
        yield Entry("worker_processes", (method,))


def _refusals() -> Iterator[Entry]:
    yield Entry("cuda_graphs", refusal="CUDAGraph")
    for kind in ("tensor", "factory", "module", "set_device"):
        yield Entry("two_devices", (kind,), refusal="invalid device ordinal")


ENTRIES: tuple[Entry, ...] = (
    *_table_1(),
    *_vision(),
    *_language(),
    *_custom_modules(),
    *_precision_and_training(),
    *_changes(),
    *_surroundings(),
    *_refusals(),
)
QUICK = tuple(entry for entry in ENTRIES if entry.quick)
