"""TensorFlow kernels that are known to be wrong on some machines."""

from __future__ import annotations

import functools
import string
from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from pipemesh.errors import PipelineError

_SIZE = 4
# Rounding errors are far smaller, and errors of the kernel far larger.
_TOLERANCE = 0.05


def check_kernels(stage: str, device: str, nodes: Iterable[tf.compat.v1.NodeDef]) -> None:
    """Raises a PipelineError if this machine computes a matmul of a stage wrongly.

    oneDNN's `Einsum` with an ellipsis ignores a needed transposition, in float16, on CPUs with
    AVX512-FP16. Each equation is tried once, with a small product.
    """
    if tf.DeviceSpec.from_string(device).device_type not in (None, "CPU"):
        return
    half = tf.float16.as_datatype_enum
    for node in nodes:
        if node.op != "Einsum" or node.attr["T"].type != half:
            continue
        equation = node.attr["equation"].s.decode()
        if "..." in equation and einsum_error(equation) > _TOLERANCE:
            raise PipelineError(
                f"stage {stage!r} computes {node.name!r}, an einsum {equation!r}, in float16, "
                "which this CPU's kernel gets wrong; spell the dims instead of the ellipsis (such "
                "as 'abi,ij->abj'), or set the environment variable TF_ENABLE_ONEDNN_OPTS=0 before "
                "TensorFlow starts; bfloat16 is computed rightly"
            )


@functools.cache
def einsum_error(equation: str) -> float:
    """Returns the relative error of a small product in float16 on this CPU.

    `equation` has an explicit output. The error is relative to the largest element.

    Example:
        >>> einsum_error("abi,ij->abj") < 0.01
        True
    """
    names, result = equation.split("->")
    # For weights the ellipsis stands for no dims; for gradients it stands for the same dims on both
    # sides.
    operands = names.split(",")
    errors = [_error(equation, operands, result, set(range(len(operands))))]
    if "..." in result:
        errors.append(_error(equation, operands, result, {0}))
    return max(errors)


def _error(equation: str, names: list[str], result: str, batched: set[int]) -> float:
    spare = "".join([c for c in string.ascii_letters if c not in equation][:2])
    spelt = [n.replace("...", spare if i in batched else "") for i, n in enumerate(names)]
    has_spare = any(spare in name for name in spelt)
    wanted = f"{','.join(spelt)}->{result.replace('...', spare if has_spare else '')}"
    rng = np.random.default_rng(0)
    values = [rng.normal(size=[_SIZE] * len(name)).astype(np.float16) for name in spelt]
    # A separate session works in a function, a TF1 graph, and eagerly.
    with tf.Graph().as_default(), tf.device("CPU:0"):
        operands = [tf.compat.v1.placeholder(tf.float16, value.shape) for value in values]
        product = tf.raw_ops.Einsum(inputs=operands, equation=equation)
        with tf.compat.v1.Session() as session:
            found = session.run(product, dict(zip(operands, values, strict=True)))
    exact = np.einsum(wanted, *(value.astype(np.float64) for value in values))
    return float(np.abs(found - exact).max() / np.abs(exact).max())
