"""Low-rank adapters of the matmuls of other layers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lingvo.core import hyperparams, py_utils

from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers.check_params import check_above_zero, check_whole
from pipemesh.layers.named.named_layer import ADAPTER, NamedLayer
from pipemesh.layers.named.norm_and_dropout import Dropout
from pipemesh.layers.named.scope import current_lowering
from pipemesh.layers.named.tally import Tally, Value
from pipemesh.lowering import Tensor, ops
from pipemesh.mesh import Dim, Shape

RANK = "rank"


class LowRank(NamedLayer):
    """The product of two narrow matrices, added to that of a weight (Hu et al., "LoRA", 2021).

    The result is `product + alpha / rank * b(a(dropout(x)))`. `a` is split like the inputs of the
    weight, and `b` like its outputs; `rank` is not split. At first `b` is zero, and `a` uniform as
    in the package `peft`. A layer makes adapters of the weights that its params `adapted` name.
    """

    takes_slices = True

    @classmethod
    def Params(cls) -> Any:
        """Defines `rank`, `alpha`, `dropout_rate` and the shape of the adapted weight."""
        p = super().Params()
        p.Define("rank", 0, "Size of `rank`.")
        p.Define("alpha", 1.0, "Factor of the product, which is divided by the rank.")
        p.Define("dropout_rate", 0.0, "Dropout rate of the inputs.")
        p.Define("weight", "", "Shape of the adapted weight, such as 'embed:4;d_ff:8'.")
        p.Define("num_inputs", 1, "Number of its first dims that its matmul sums over.")
        p.Define("padding", {}, "`PaddedDims` of its layer.")
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        check_whole(p.name, "rank", p.rank, 1)
        check_above_zero(p.name, "alpha", p.alpha)
        if (axis := current_lowering().rules.axis(RANK)) is not None:
            raise LayoutError(
                f"{p.name}: the rule '{RANK}:{axis}' splits the narrow dim of adapters, which each "
                "device needs whole; remove the rule"
            )
        self.CreateChild("dropout", Dropout.Params().Set(rate=p.dropout_rate))

    @classmethod
    def PaddedDims(cls, p: Any) -> dict[str, int]:
        """Returns those of the adapted weight's layer."""
        return p.padding

    @classmethod
    def NamedWeights(cls, p: Any) -> dict[str, Any]:
        """Returns `a` and `b`."""
        dims, rank = Shape.from_text(p.weight).dims, Dim(RANK, p.rank)
        inputs, outputs = dims[: p.num_inputs], dims[p.num_inputs :]
        # Kaiming's uniform distribution with the slope sqrt(5) that `peft` uses.
        limit = 1 / math.sqrt(math.prod(dim.size for dim in inputs))
        return {
            "a": (Shape((*inputs, rank)), py_utils.WeightInit.Uniform(limit)),
            "b": (Shape((rank, *outputs)), py_utils.WeightInit.Constant(0.0)),
        }

    @classmethod
    def Matrices(cls, p: Any) -> dict[str, tuple[str, str]]:
        """Returns `a` and `b`, as `torch.optim.Muon` takes those of `peft`."""
        names = Shape.from_text(p.weight).names
        inputs, outputs = names[: p.num_inputs], names[p.num_inputs :]
        return {"a": (";".join(inputs), RANK), "b": (RANK, ";".join(outputs))}

    def FProp(self, theta: Any, x: Tensor, product: Tensor) -> Tensor:
        """Adds to the product of `x` with the adapted weight."""
        p, a, b = self.params, self.Weight(theta, "a"), self.Weight(theta, "b")
        rows, names = _rows(x.shape, a.shape, product.shape)
        narrow = ops.einsum([self.dropout.FProp(theta.dropout, x), a], [*rows, RANK], names)
        return product + ops.einsum([narrow, b], product.shape.names) * (p.alpha / p.rank)

    @classmethod
    def CountCosts(cls, p: Any, tally: Tally, x: Value, product: Value) -> Value:
        """Counts both matmuls."""
        weights = cls.CountedWeights(p, tally)
        rows, names = _rows(x.shape, weights["a"].shape, product.shape)
        x = cls.CountPart(p, Dropout.Params().Set(rate=p.dropout_rate), tally, x)
        narrow = tally.einsum([x, weights["a"]], [*rows, RANK], names=names)
        tally.elementwise(product, tally.einsum([narrow, weights["b"]], product.shape.names))
        return tally.made(product.shape, product)


def _rows(x: Shape, a: Shape, product: Shape) -> tuple[Sequence[str], Mapping[str, str]]:
    """Returns the dims of `x` that stay, and their new names in the product where they differ."""
    rows = [name for name in x.names if name not in a.names]
    pairs = zip(rows, product.names, strict=False)
    return rows, {old: new for old, new in pairs if old != new}


def adapt(layers: Sequence[Any], adapter: Any, targets: str) -> None:
    """Gives the layers of a stack adapters, in their params.

    Args:
        layers: params of the layers, first to last.
        adapter: params of a `LowRank` with rank, alpha and dropout rate.
        targets: a regular expression of weights, such as `attention/w_[qv]`. Their names begin
            with the number of their layer in the stack, as in `cell_003/attention/w_q`.

    Raises:
        PipelineError: it is no regular expression, or finds no weight that can be adapted.
    """
    try:
        pattern = re.compile(targets)
    except re.error as error:
        raise PipelineError(f"targets {targets!r} are no regular expression ({error})") from error
    known: list[str] = []
    for number, layer in enumerate(layers):
        for path, part in _parts(layer, f"cell_{number:03d}"):
            names = [f"{path}/{name}" for name in part.cls.Matrices(part) if part.cls.adaptable]
            chosen = [name.rpartition("/")[2] for name in names if pattern.search(name)]
            if chosen:
                part.Set(adapted=tuple(chosen), adapter_tpl=adapter)
            known += names
    if not any(pattern.search(name) for name in known):
        names = dict.fromkeys(name.partition("/")[2] for name in known)
        raise PipelineError(
            f"targets {targets!r} find no weight that can have an adapter; there are "
            f"{', '.join(names) or 'none'}, each after its layer, as in {known[:1]}"
        )


def _parts(p: Any, path: str) -> list[tuple[str, Any]]:
    """Returns the params of named layers within a layer's, with their paths in it."""
    found = [(path, p)]
    for name, value in p.IterParams():
        is_params = isinstance(value, hyperparams.InstantiableParams)
        if is_params and issubclass(value.cls, NamedLayer):
            found += _parts(value, f"{path}/{name.removesuffix('_tpl')}")
    return found


# Finds the names of adapters' weights.
ADAPTERS = rf"{ADAPTER}/"
