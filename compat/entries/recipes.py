"""Entries of what tutorials, model cards and research code do with models, each a few lines."""

from collections.abc import Iterator

from compat.entry import Entry

SURGERY = (
    "new_head inserted_layer extracted_features hook_with_keywords tied_weights loaded_partly"
    " mapped_locations applied_initialisation symmetric_weight structured_answers"
    " remembered_activations growing_module_list low_rank_wrapper changed_precision own_methods"
    " bound_methods"
)
STYLES = (
    "logged printed warned asserted branching counting timed rounded masked cached memoised"
    " scheduled routed iterated sampled decorated autocasting sized collected generated devices"
    " recursive strings tried"
)
PICTURES = "feature_extractors segmented faster masks keypoints one_stage anchor_free single_shot"
TEXTS = (
    "dispatched pooled_sentences steered_generation beams_and_groups beam_by_hand cached_by_hand"
    " perplexity streamed new_words halves"
)
SERVERS = (
    "http_server batching_loop pipeline_of_threads exported_and_saved compiled_modes"
    " symbolic_rewrite own_operator older_library data_loaders profiled"
)
SPELLINGS = "default_tensor_type default_device numbered_devices backends attention_kernels"
SURROUNDINGS = (
    "module_globals nested_tables numpy_state numpy_randomness python_randomness torch_randomness"
    " context_variables configurations closures class_state containers remembered_results"
    " attributes_of_tensors defaults_and_settings"
)
HELPERS = "iterators clocks identities files queues counters callables locked weakly_kept raised"
# Those whose models are trained, or are given to what computes gradients.
TRAINED = {
    ("kept_activations", "torch"): (
        "by_hook by_attribute by_output by_retained_gradient by_backward_hook by_function by_parts"
        " by_embedding hooked_inside by_integration by_view by_written_activation by_dropout"
    ),
    ("library_recipes", "vision"): "timm_training",
    ("library_recipes", "research"): "lightning_module fabric probabilities",
    ("library_recipes", "diffusers"): "diffusion_training",
    ("model_surgery", "torch"): "moving_average frozen_body folded_batch_norm",
    ("forward_styles", "torch"): "gradients",
    ("training_recipes", "torch"): (
        "gan gradient_penalty variational policy_gradient q_learning contrastive distillation"
        " accumulated resumed adversarial class_activation adapted_quickly"
        " differential_equation denoising connectionist checkpointed early_stopped"
    ),
    ("old_spellings", "torch"): "variables mixed_precision detected_anomaly data_parallel",
    ("server_recipes", "torch"): "quantized one_process_group",
    ("picture_recipes", "vision"): "detector_trained fine_tuned styled",
    ("text_recipes", "language"): "trained_by_trainer accelerated attention_ways",
}
WITHOUT_MODEL = {
    ("old_spellings", "torch"): (
        "legacy_types new_tensors memory_statistics events_and_streams pinned_copies generators"
        " answers_of_type errors"
    ),
    ("numeric_recipes", "torch"): (
        "clusters components mandelbrot random_walks game_of_life pictures_filtered sounds heat"
        " bodies ranked_documents grouped_sums monte_carlo linear_systems with_numpy in_place"
        " integers"
    ),
    # A spawned process has its model for itself; TorchScript runs as it is.
    ("server_recipes", "torch"): "spawned_worker shared_tensor scripted_and_saved",
    ("library_recipes", "research"): "metrics",
    ("library_recipes", "images"): "augmented_pictures",
    ("picture_recipes", "vision"): "transforms annotated mixed_up box_operations drawn",
}
QUICK = {
    "python_randomness",
    "by_output",
    "hooked_inside",
    "own_operator",
    "remembered_activations",
    "routed",
    "variables",
    "generators",
    "gan",
    "with_numpy",
}


def recipe_entries() -> Iterator[Entry]:
    """One a recipe."""
    for (program, group), names in {
        ("model_surgery", "torch"): SURGERY,
        ("forward_styles", "torch"): STYLES,
        ("picture_recipes", "vision"): PICTURES,
        ("text_recipes", "language"): TEXTS,
        ("old_spellings", "torch"): SPELLINGS,
        ("server_recipes", "torch"): SERVERS,
        ("changed_surroundings", "torch"): SURROUNDINGS,
        ("stateful_helpers", "torch"): HELPERS,
        ("kept_activations", "torch"): "never_asked",
        ("library_recipes", "vision"): "timm_features",
        ("library_recipes", "research"): "rearranging",
        ("library_recipes", "diffusers"): "diffusion_pipeline",
        ("library_recipes", "adapters"): "several_adapters",
        ("library_recipes", "graphs"): "graphs",
    }.items():
        for name in names.split():
            yield Entry(program, (name,), group=group, quick=name in QUICK)
    for (program, group), names in TRAINED.items():
        for name in names.split():
            yield Entry(program, (name,), group=group, quick=name in QUICK, trains=True)
    for (program, group), names in WITHOUT_MODEL.items():
        for name in names.split():
            yield Entry(program, (name,), group=group, quick=name in QUICK, has_model=False)
