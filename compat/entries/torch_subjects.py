"""Entries of torch's own features: layers, functions, and what lies beside them."""

from collections.abc import Iterator

from compat.entry import Entry

LAYERS = (
    "conv1d conv2d conv3d transposed max_pool avg_pool lp_pool adaptive_pool unpool pads"
    " circular_pad batch_norm group_norm instance_norm layer_norm rms_norm local_response_norm"
    " spectral_norm weight_norm orthogonal gates smooth_gates hard_gates self_gates shrinks"
    " softmaxes lstm projected_lstm gru rnn lstm_cell gru_cell attention transformer bilinear"
    " cosine pairwise losses fold unfold shuffles channel_shuffle upsample bicubic flatten dropouts"
)
FUNCTIONS = (
    "decompositions solving spectra short_spectra special_functions sorting counting scattering"
    " indexing shapes scalars_first einsums complex_numbers integers sampling attention losses"
    " reductions"
)
TRANSFORMS = (
    "batched nested gradient weight_gradient for_each_sample jacobian second_derivative"
    " forward_derivative backward_derivative replaced_weights ensemble random_batched"
)
DIFFERENTIATES = {
    *("gradient", "weight_gradient", "for_each_sample", "jacobian", "second_derivative"),
    *("forward_derivative", "backward_derivative"),
}
DISTRIBUTIONS = (
    "Normal LogNormal Gamma Beta Laplace StudentT Gumbel Categorical Bernoulli Poisson Dirichlet"
    " MultivariateNormal Mixture Transformed Independent Weibull"
)
OPTIMIZERS = "AdamW Adagrad Adadelta Adamax NAdam RAdam ASGD Rprop LBFGS Adafactor Muon SGD"
FORMS = (
    "exported exported_dynamic traced_symbolically pruned pruned_for_good checkpointed"
    " checkpointed_parts copied pickled fused masked half_and_back profiled meta_then_empty"
    " swapped_parts compiled_by_own_backend torchao_int8 quanto_int8"
)
FORMS_WITHOUT_MODEL = "quantized_dynamically sparse_weight coordinate_sparse"
ENCODERS = "padded no_nesting norm_first attention one_layer gelu embedded causal unpadded"
QUICK = {
    "unpool",
    "lstm",
    "pads",
    "spectra",
    "scalars_first",
    "counting",
    "jacobian",
    "padded",
    "Normal",
}


def torch_entries() -> Iterator[Entry]:
    """One a layer, a subject of functions, an optimizer ..."""
    for program, names in {
        "torch_layers": LAYERS,
        "torch_functions": FUNCTIONS,
        "function_transforms": TRANSFORMS,
        "distribution_families": DISTRIBUTIONS,
        "other_forms": FORMS,
        "encoder_paths": ENCODERS,
        "nested_tensors": "strided as_nested",
        "flexible_attention": "module",
    }.items():
        for name in names.split():
            yield Entry(program, (name,), quick=name in QUICK, trains=name in DIFFERENTIATES)
    for name in ("jagged", "offsets"):
        yield Entry("nested_tensors", (name,), has_model=False, refusal="torch.jagged")
    for name in OPTIMIZERS.split():
        yield Entry("optimizers", (name,), trains=True)
    yield Entry("flexible_attention", ("function",), has_model=False)
    for name in FORMS_WITHOUT_MODEL.split():
        yield Entry("other_forms", (name,), has_model=False)
