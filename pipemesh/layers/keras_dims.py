"""Names for the dims of Keras weights, by which layout rules split them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras

from pipemesh.backend.keras_models import layers_within, parts_of
from pipemesh.errors import PipelineError, ShapeError
from pipemesh.lowering.arguments import dim_names
from pipemesh.mesh import Shape

# Begins the names of dims that no rule can split.
NAMELESS = "nameless_"


def weight_shapes(
    owner: str,
    layer: Any,
    variables: Sequence[Any],
    paths: Sequence[Sequence[str]],
    patterns: Mapping[str, str],
) -> list[Shape]:
    """Returns a shape with named dims for each variable of a Keras layer or model.

    `patterns` are names by patterns of paths, whose parts a slash separates.
    """
    names = {id(variable): dims for variable, dims in _named(layer)}
    texts = ["/".join(path) for path in paths]
    unused = set(patterns)
    shapes = []
    for variable, path in zip(variables, texts, strict=True):
        dims = names.get(id(variable), ())
        pattern = next((each for each in patterns if re.search(each, path)), None)
        if pattern is not None:
            dims = tuple(dim_names(patterns[pattern])) if patterns[pattern] else ()
            unused.discard(pattern)
        sizes = variable.shape
        if dims and not len(dims) == len(set(dims)) == len(sizes):
            raise ShapeError(
                f"{owner}: dims names the weight {path!r} of sizes {list(sizes)} {';'.join(dims)!r}"
                f"; give {len(sizes)} names, all different"
            )
        dims = dims or tuple(f"{NAMELESS}{number}" for number in range(len(sizes)))
        shapes.append(Shape.of(**dict(zip(dims, sizes, strict=True))))
    if unused:
        raise no_weight(owner, unused, texts)
    return shapes


def no_weight(owner: str, patterns: Collection[str], texts: Iterable[str]) -> PipelineError:
    """Returns the error of patterns that match none of the weights with these paths."""
    return PipelineError(
        f"{owner}: dims has {min(patterns)!r}, which matches no weight; the weights are "
        f"{', '.join(texts)}"
    )


def _named(model: Any) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yields the weights with named dims of a layer and all inside."""
    for layer in layers_within(model):
        if isinstance(layer, keras.layers.EinsumDense):
            yield from _einsum(layer, "heads")
        elif isinstance(layer, keras.layers.Dense):
            kernel: Any = layer.kernel
            yield from _with_bias(layer, *_sides(kernel.shape))
        elif isinstance(layer, keras.layers.Embedding):
            yield layer.embeddings, ("vocab", "embed")
            # Of keras-hub's, which also maps back to tokens.
            if (reverse := getattr(layer, "reverse_embeddings", None)) is not None:
                yield reverse, ("embed", "vocab")
        elif isinstance(layer, keras.layers.Conv1D | keras.layers.Conv2D | keras.layers.Conv3D):
            if layer.groups == 1 and layer.data_format == "channels_last":
                window = [f"window_{number}" for number in range(layer.rank)]
                yield from _with_bias(layer, [*window, "channels"], ["features"])
    for layer in layers_within(model):
        # Of attention, in which keys and values may have fewer heads. Later names replace earlier.
        heads = {
            each: _heads(each)
            for each in parts_of(layer)
            if isinstance(each, keras.layers.EinsumDense)
        }
        most = max(heads.values(), default=0)
        for dense, number in heads.items():
            if 0 < number < most:
                yield from _einsum(dense, "kv_heads")


def _with_bias(
    layer: Any, inputs: Sequence[str], outputs: Sequence[str]
) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yields the kernel and the bias, whose last dims are those of outputs."""
    yield layer.kernel, (*inputs, *outputs)
    if layer.bias is not None:
        rank = len(layer.bias.shape)
        yield layer.bias, tuple(outputs[len(outputs) - rank :])


def _sides(sizes: Sequence[int]) -> tuple[list[str], list[str]]:
    """Returns the names of both sides of a matrix, by which of them is larger."""
    inputs, outputs = sizes
    if inputs == outputs:
        return ["inputs"], ["outputs"]
    return (["embed"], ["d_ff"]) if inputs < outputs else (["d_ff"], ["embed"])


def _einsum(layer: Any, heads: str) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yields the weights of an `EinsumDense` layer of the forms that attention or `Dense` has."""
    outputs = _outputs(layer)
    if outputs is None:
        return
    rank = len(layer.kernel.shape)
    names = {
        (2, 1): _sides(layer.kernel.shape) if rank == 2 else None,
        (3, 2): (["embed"], [heads, "head_dim"]),
        (3, 1): ([heads, "head_dim"], ["embed"]),
    }.get((rank, outputs))
    if names is not None:
        yield from _with_bias(layer, *names)


def _outputs(layer: Any) -> int | None:
    """Returns how many last dims of the kernel are those of the result; the others are summed."""
    x, kernel, result = re.split(",|->", layer.equation.replace("...", ""))
    kept = [letter in result for letter in kernel]
    outputs = sum(kept)
    ordered = kept == [False] * (len(kept) - outputs) + [True] * outputs
    return (
        outputs if ordered and all(letter in x for letter in kernel[: -outputs or None]) else None
    )


def _heads(layer: Any) -> int:
    """Returns the number of heads of a projection to heads or from them, 0 for other layers."""
    outputs, sizes = _outputs(layer), layer.kernel.shape
    return sizes[outputs - 1] if len(sizes) == 3 and outputs in (1, 2) else 0


def paths_of(variables: Sequence[Any]) -> list[list[str]]:
    """Returns the parts of paths, numbered within the model: not `dense_7` but `dense`.

    Keras numbers unnamed layers over the whole process, and a checkpoint must not depend on that.
    """
    siblings: dict[tuple[str, ...], dict[str, str]] = {}
    renumbered = []
    for path in (variable.path.split("/") for variable in variables):
        new: list[str] = []
        # Keras numbers unnamed weights too.
        unnamed = re.fullmatch(r"variable(_\d+)?", path[-1])
        for part in path if unnamed else path[:-1]:
            known = siblings.setdefault(tuple(new), {})
            if part not in known:
                base = re.sub(r"_\d+$", "", part)
                wanted = [base, *(f"{base}_{number}" for number in range(1, len(known) + 1))]
                known[part] = next(name for name in wanted if name not in known.values())
            new.append(known[part])
        renumbered.append(new if unnamed else [*new, path[-1]])
    return renumbered
