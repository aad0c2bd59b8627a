"""Which programs may read a function's memory itself, instead of a copy of their large inputs.

The function can write to such memory while a program reads it. The numbers are then garbage, as
they would be on a GPU; but an operator that reads a value twice, to check it and then to go where
it says, would leave its memory. So a program borrows its inputs only if all of its operators read
elements as numbers: where they read and write depends on shapes alone. And none of them writes to
an input, since a call may have to be repeated.
"""

from torch_shim.wire.programs import Program


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Not here: what indexes, sorts, counts before it fills (nonzero, masked_select, unique), samples,
# or divides integers (the processor traps a division by zero behind the check for it).
_BORROWING = _words(
    """
    abs add addcdiv addcmul addmm alias amax amin atan avg_pool1d avg_pool2d baddbmm batch_norm bmm
    broadcast_to cat ceil chunk clamp clamp_max clamp_min clone concat conj contiguous conv1d conv2d
    conv3d conv_transpose1d conv_transpose2d convolution cos cosh detach diff div divide dropout
    elu eq erf exp expand expand_as expm1 fft_fft fft_ifft fft_rfft flatten flip float floor ge
    gelu group_norm gt half hardsigmoid hardswish hardtanh instance_norm interpolate isfinite isinf
    isnan layer_norm le leaky_relu lerp linear log log10 log1p log2 log_softmax logsumexp lt matmul
    max_pool1d max_pool2d maximum mean minimum mish mm movedim mse_loss mul multiply mv
    narrow ne neg norm normalize pad permute pow prod reciprocal relu relu6 reshape rms_norm round
    rsqrt rsub select selu sigmoid sign silu sin sinh size slice softmax softplus split sqrt square
    squeeze stack std sub subtract sum swapaxes t tan tanh transpose tril triu true_divide truediv
    trunc unbind unflatten unsqueeze upsample var view view_as where zeros_like ones_like
    __add__ __mul__ __neg__ __radd__ __rmul__ __rsub__ __sub__ __truediv__ __matmul__ pos
    T mT shape dtype device ndim adaptive_avg_pool1d adaptive_avg_pool2d
    """
)


def may_borrow(program: Program) -> bool:
    """Whether the program's inputs may lie in memory that the function writes to meanwhile.

    As far as the operators' names say: none of its steps may write to what it is given.
    """
    return not program.parts and all(_short(step.operator) in _BORROWING for step in program.steps)


def _short(name: str) -> str:
    """The operator's own name: `mul` of `o:mul`, `t:torch.mul` and `a:aten::mul.Tensor`."""
    kind, _, rest = name.partition(":")
    if kind == "a":
        namespace, _, short = rest.partition("::")
        return short.partition(".")[0] if namespace == "aten" else name
    return rest.rpartition(".")[2]
