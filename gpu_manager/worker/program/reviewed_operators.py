"""The operators that were reviewed: programs may name these and no other.

An operator is here if it reads and writes its tensors and nothing else, and if no argument makes
it leave their memory: `make fuzz` calls each of them with arguments that no model has, between
pages that nobody may touch. What a later torch adds is not allowed until it stands here. Not here:
sparse, nested, quantized and packed tensors (their kernels believe what a tensor says of itself),
operators that are told to be `unsafe`, those of one library of CUDA, and those of other devices.
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Each stands for the function, the method and the registered operator of that name, and for the
# one in place, with an underscore behind it.
PUBLIC = _words(
    """
    abs absolute acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool1d_with_indices adaptive_max_pool2d
    adaptive_max_pool2d_with_indices adaptive_max_pool3d adaptive_max_pool3d_with_indices add
    addbmm addcdiv addcmul addmm addmv addr adjoint affine_grid affine_grid_generator airy_ai
    alias alias_copy all allclose alpha_dropout amax amin aminmax angle any arange arccos arccosh
    arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort argwhere as_strided
    as_strided_copy as_strided_scatter as_tensor asarray asin asinh atan atan2 atanh atleast_1d
    atleast_2d atleast_3d avg_pool1d avg_pool2d avg_pool3d baddbmm bartlett_window batch_norm
    bernoulli bessel_j0 bessel_j1 bessel_y0 bessel_y1 bfloat16 bilinear binary_cross_entropy
    binary_cross_entropy_with_logits bincount binomial bitwise_and bitwise_left_shift bitwise_not
    bitwise_or bitwise_right_shift bitwise_xor blackman_window block_diag bmm bool
    broadcast_shapes broadcast_tensors broadcast_to bucketize byte can_cast cartesian_prod cat
    cauchy cdist cdouble ceil celu cfloat chain_matmul chalf channel_shuffle char
    chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
    cholesky cholesky_ex cholesky_inverse cholesky_solve chunk clamp clamp_max clamp_min clip
    clone col2im column_stack combinations complex concat concatenate cond conj conj_physical
    constant_ constant_pad_nd contiguous conv1d conv2d conv3d conv_tbc conv_transpose1d
    conv_transpose2d conv_transpose3d convolution copy copysign corrcoef cos cosh
    cosine_embedding_loss cosine_similarity count_nonzero cov cpu cross cross_entropy
    cross_entropy_loss cuda cummax cummin cumprod cumsum cumulative_trapezoid deg2rad det detach
    detach_copy diag diag_embed diagflat diagonal diagonal_copy diagonal_scatter diff digamma dim
    dim_order dirac_ dist div divide dot double dropout dropout1d dropout2d dropout3d dsplit
    dstack eig eigh eigvals eigvalsh einsum element_size elu embedding embedding_bag empty
    empty_like empty_permuted empty_strided entr eq equal erf erfc erfcx erfinv exp exp2 expand
    expand_as expand_copy expit expm1 exponential eye feature_alpha_dropout feature_dropout fft
    fft2 fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft
    fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2
    fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn fftfreq fftn fftshift fill fill_diagonal_
    fix flatten flip fliplr flipud float float_power floor floor_divide fmax fmin fmod fold frac
    fractional_max_pool2d fractional_max_pool2d_with_indices fractional_max_pool3d
    fractional_max_pool3d_with_indices frexp frobenius_norm full full_like gammainc gammaincc
    gammaln gather gaussian_nll_loss gcd ge gelu geometric geqrf ger get_device glu gradient
    greater greater_equal grid_sample grid_sampler grid_sampler_2d grid_sampler_3d group_norm gru
    gru_cell gt gumbel_softmax half hamming_window hann_window hardshrink hardsigmoid hardswish
    hardtanh heaviside hermite_polynomial_h hermite_polynomial_he hfft hfft2 hfftn
    hinge_embedding_loss histc histogram histogramdd householder_product hsplit hstack huber_loss
    hypot i0 i0e i1 i1e ifft ifft2 ifftn ifftshift igamma igammac ihfft ihfft2 ihfftn im2col imag
    index index_add index_copy index_fill index_put index_reduce index_select inner instance_norm
    int interpolate inv inv_ex inverse irfft irfft2 irfftn is_complex is_conj is_contiguous
    is_floating_point is_grad_enabled is_inference is_inference_mode_enabled is_leaf is_neg
    is_nonzero is_same_size is_signed is_tensor isclose isfinite isin isinf isnan isneginf
    isposinf isreal istft item kaiming_normal_ kaiming_uniform_ kaiser_window kl_div kron kthvalue
    l1_loss laguerre_polynomial_l layer_norm ldexp ldl_factor ldl_factor_ex ldl_solve le
    leaky_relu legendre_polynomial_p lerp less less_equal lgamma linalg__powsum linalg_cholesky
    linalg_cholesky_ex linalg_cond linalg_cross linalg_det linalg_diagonal linalg_eig linalg_eigh
    linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex
    linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu
    linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matmul linalg_matrix_exp
    linalg_matrix_norm linalg_matrix_power linalg_matrix_rank linalg_matrix_sqrth linalg_multi_dot
    linalg_norm linalg_pinv linalg_polar linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
    linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve
    linalg_vander linalg_vecdot linalg_vector_norm linear linear_cross_entropy linspace
    local_response_norm log log10 log1p log2 log_ndtr log_normal log_sigmoid log_sigmoid_forward
    log_softmax logaddexp logaddexp2 logcumsumexp logdet logical_and logical_not logical_or
    logical_xor logit logsigmoid logspace logsumexp long lp_pool1d lp_pool2d lp_pool3d lstm
    lstm_cell lstsq lt lu lu_factor lu_factor_ex lu_solve lu_unpack mH mT margin_ranking_loss
    masked_fill masked_scatter masked_select matmul matrix_H matrix_exp matrix_norm matrix_power
    matrix_rank matrix_sqrth max max_pool1d max_pool1d_with_indices max_pool2d
    max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool1d max_unpool2d
    max_unpool3d maximum mean median meshgrid min minimum mish mm mode modified_bessel_i0
    modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 moveaxis movedim mse_loss msort mul
    multi_dot multi_head_attention_forward multi_margin_loss multigammaln multilabel_margin_loss
    multilabel_soft_margin_loss multinomial multiply mv mvlgamma
    nan_to_num nanmean nanmedian nanquantile nansum narrow narrow_copy native_batch_norm
    native_channel_shuffle native_dropout native_group_norm native_layer_norm ndimension ndtr
    ndtri ne neg negative nelement new_empty new_empty_strided new_full new_ones new_tensor
    new_zeros nextafter nll_loss nll_loss2d nll_loss2d_forward nll_loss_forward nll_loss_nd
    nonzero nonzero_numpy nonzero_static norm normal normal_functional normalize not_equal
    nuclear_norm numel numpy_T one_hot ones ones_like orgqr ormqr orthogonal_ outer pad
    pad_sequence pairwise_distance pdist permute permute_copy pinv pinverse pixel_shuffle
    pixel_unshuffle poisson poisson_nll_loss polar polygamma positive pow prelu prod promote_types
    psi put qr quantile rad2deg rand rand_like randint randint_like randn randn_like random
    randperm range ravel real reciprocal reflection_pad1d reflection_pad2d reflection_pad3d relu
    relu6 remainder renorm repeat repeat_interleave replication_pad1d replication_pad2d
    replication_pad3d reshape reshape_as resolve_conj resolve_neg result_type rfft rfft2 rfftfreq
    rfftn rms_norm rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell roll rot90 round row_stack rrelu
    rrelu_with_noise rrelu_with_noise_functional rsqrt rsub scalar_tensor
    scaled_dot_product_attention scaled_modified_bessel_k0 scaled_modified_bessel_k1 scatter
    scatter_add scatter_reduce searchsorted select select_copy select_scatter selu sgn
    shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
    shifted_chebyshev_polynomial_w short sigmoid sign signbit silu sin sinc sinh size slice
    slice_copy slice_scatter slogdet smooth_l1_loss soft_margin_loss softmax softmin softplus
    softshrink softsign solve solve_ex solve_triangular sort special_airy_ai special_bessel_j0
    special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
    special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w
    special_digamma special_entr special_erf special_erfc special_erfcx special_erfinv
    special_exp2 special_expit special_expm1 special_gammainc special_gammaincc special_gammaln
    special_hermite_polynomial_h special_hermite_polynomial_he special_i0 special_i0e special_i1
    special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p special_log1p
    special_log_ndtr special_log_softmax special_logit special_logsumexp
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
    special_modified_bessel_k1 special_multigammaln special_ndtr special_ndtri special_polygamma
    special_psi special_round special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_sinc
    special_softmax special_spherical_bessel_j0 special_xlog1py special_xlogy special_zeta
    spherical_bessel_j0 split split_copy split_with_sizes split_with_sizes_copy sqrt square
    squeeze squeeze_copy stack std std_mean stft storage_offset stride sub subtract sum
    sum_to_size svd svdvals swapaxes swapdims sym_float sym_int sym_ite sym_max sym_min sym_not
    sym_sqrt sym_sum t t_copy take take_along_dim tan tanh tanhshrink tensor tensor_split
    tensordot tensorinv tensorsolve threshold tile to topk trace transpose transpose_copy
    trapezoid trapz triangular_solve tril tril_indices triplet_margin_loss triu triu_indices
    true_divide trunc trunc_normal_ type type_as unbind unbind_copy unflatten unfold unfold_copy
    uniform unique unique_consecutive unique_dim unique_dim_consecutive unravel_index unsqueeze
    unsqueeze_copy upsample upsample_bicubic2d upsample_bilinear upsample_bilinear2d
    upsample_linear1d upsample_nearest upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d vander var var_mean vdot vecdot vector_norm view view_as view_as_complex
    view_as_complex_copy view_as_real view_as_real_copy view_copy vsplit vstack where
    xavier_normal_ xavier_uniform_ xlog1py xlogy zero zeros zeros_like zeta
"""
)

# Methods by which Python's own operators are called.
DUNDERS = _words(
    """
    __add__ __and__ __bool__ __complex__ __contains__ __div__ __eq__ __float__ __floordiv__ __ge__
    __getitem__ __gt__ __iadd__ __iand__ __idiv__ __ifloordiv__ __ilshift__ __imod__ __imul__
    __index__ __int__ __invert__ __ior__ __irshift__ __isub__ __ixor__ __le__ __len__ __long__
    __lshift__ __lt__ __matmul__ __mod__ __mul__ __ne__ __nonzero__ __or__ __radd__ __rand__
    __rdiv__ __reversed__ __rfloordiv__ __rlshift__ __rmatmul__ __rmod__ __rmul__ __ror__ __rpow__
    __rrshift__ __rshift__ __rsub__ __rxor__ __setitem__ __sub__ __truediv__ __xor__
"""
)

# Names that begin with an underscore, by the reason to have them: torch puts them into graphs.
INTERNAL = {
    "what torch.export and its decompositions leave of public operators": _words(
        """_adaptive_avg_pool2d _adaptive_avg_pool3d _cdist_forward _conj _conj_copy _conj_physical
    _convolution _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd
    _local_scalar_dense _log_softmax _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _neg_view
    _pdist_forward _prelu_kernel _safe_softmax _scaled_dot_product_attention_math
    _softmax _to_copy _trilinear _unique2
    _unsafe_view _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm_interface
    _batch_norm_with_update _embedding_bag _embedding_bag_forward_only"""
    ),
    "what torch's own modules call: layers, attention and masks": _words(
        """_canonical_mask _fused_rms_norm _native_multi_head_attention _shape_as_tensor
    _transformer_encoder_layer_fwd _weight_norm _cast_Float _cast_Half"""
    ),
    "assertions and symbolic numbers, which Dynamo adds": _words(
        """_assert _assert_async _assert_scalar _assert_tensor_metadata _check _check_is_size
    _functional_assert_async _functional_assert_scalar _functional_sym_constrain_range
    _functional_sym_constrain_range_for_size _is_all_true _is_any_true _sym_int _sym_sqrt
    sym_constrain_range sym_constrain_range_for_size _sym_acos _sym_asin _sym_atan _sym_cos
    _sym_cosh _sym_log2 _sym_sin _sym_sinh _sym_tan _sym_tanh sym_size sym_stride sym_numel
    sym_storage_offset"""
    ),
}
_OF_TORCH = frozenset().union(PUBLIC, DUNDERS, *INTERNAL.values())

# Registered operators of other libraries.
OF_LIBRARIES = {
    "torchvision": _words("deform_conv2d nms ps_roi_align ps_roi_pool roi_align roi_pool"),
    "gpufaas": _words("padded_encoder"),  # torch_shim/kernels
}


def is_reviewed(name: str) -> bool:
    return name in _OF_TORCH or (name.endswith("_") and name[:-1] in PUBLIC)
