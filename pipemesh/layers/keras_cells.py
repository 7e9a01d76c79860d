"""A Keras model as a list of layers, which can be cut into stages."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from pipemesh.backend.keras_models import (
    calls_in_order,
    functional_of,
    is_functional,
    mask_of,
    nesting_of,
    takes_training,
    with_mask,
)
from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import with_article
from pipemesh.layers.feature_extraction import is_stage
from pipemesh.layers.foreign_layers import KerasLayer
from pipemesh.layers.keras_dims import no_weight, paths_of


class _Ref(NamedTuple):
    """Stands for a tensor of the model, by its number."""

    number: int


class _Call(NamedTuple):
    """A call of a layer or of an operation of `keras.ops`."""

    operation: Any
    args: Any
    kwargs: Any
    outputs: tuple[int, ...]


@dataclasses.dataclass
class _Cell:
    """Calls from the first layer with weights to the next one."""

    calls: list[_Call]
    is_first: bool
    takes: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()
    # The model's own nesting of the results, of the last cell.
    nesting: Any = None
    # The model's own dtype policy: Keras's global one may change before the cell is made.
    policy: Any = None
    # Whether the last cell hands on masks, after the results.
    gives_masks: bool = False

    def __call__(self) -> Any:
        """Makes the layer, as `KerasLayer` does."""
        return _Part(self)

    def __deepcopy__(self, memo: Any) -> _Cell:
        """Returns the same: params are copied, and its layers must not be."""
        return self


def keras_layers(model: Any, **params: Any) -> list[Any]:
    """Returns params of a `KerasLayer` for each layer with weights of a Keras model, in order.

    `PartitionSequentialLayers` cuts them into stages. Layers and operations without weights belong
    to the layer before. Models inside are taken apart too. Layers hand on all tensors that later
    ones need, with their masks, so a model need not be a chain. The first one takes the model's
    inputs one by one, in the order of `model.inputs`. The last one returns what the model returns.

    The weights begin with the values that they have in the model. The model keeps these: its layers
    are called with the weights of these layers instead.

    Args:
        model: a functional or sequential model that knows its input shape, or a function that
            makes one.
        **params: values of further params of each `KerasLayer`, such as `dims`; patterns in `dims`
            go to the layers that have weights of these paths.

    Raises:
        PipelineError: it is no such model, or one of its layers is called in two places.

    Example:
        >>> import keras
        >>> from pipemesh.layers import keras_layers
        >>> dense = keras.layers.Dense
        >>> model = keras.Sequential(
        ...     [keras.Input([2]), dense(3, "relu", name="first"), dense(1, name="last")])
        >>> [layer.name for layer in keras_layers(model)]
        ['first', 'last']
    """
    made: Any = model
    if not isinstance(model, keras.Layer) and callable(model):
        made = model()
    inputs, calls, results = _calls_of(made)
    cells: list[_Cell] = []
    for call in calls:
        if not cells or getattr(call.operation, "weights", ()):
            cells.append(_Cell([], not cells, policy=made.dtype_policy))
        cells[-1].calls.append(call)
    if not cells:
        raise PipelineError(f"model {made.name!r} has no layer; give one that computes something")
    # What the cell that is made, and all later ones, need.
    needed = dict.fromkeys(results)
    for cell in reversed(cells):
        cell.gives = tuple(sorted(needed))
        for call in reversed(cell.calls):
            for number in call.outputs:
                needed.pop(number, None)
            needed.update(dict.fromkeys(_numbers((call.args, call.kwargs))))
        cell.takes = tuple(sorted(needed))
    cells[0].takes = inputs
    cells[-1].gives = tuple(results)
    cells[-1].nesting = nesting_of(_functional(made))
    _check_apart(made, cells)
    dims = params.pop("dims", {})
    unused = set(dims)
    layers = []
    for cell in cells:
        paths = ["/".join(path) for path in paths_of(_variables(cell))]
        of_cell = [each for each in dims if any(re.search(each, path) for path in paths)]
        unused.difference_update(of_cell)
        layers.append(
            KerasLayer.Params().Set(
                name=cell.calls[0].operation.name,
                layer=cell,
                dims={each: dims[each] for each in of_cell},
                **params,
            )
        )
    if unused:
        raise no_weight(f"model {made.name!r}", unused, map("/".join, paths_of(made.variables)))
    return layers


def masked_stack(stack: Any) -> tuple[Any, Any]:
    """Returns a stack of `keras_layers` that also returns its outputs' masks, and their nesting.

    The nesting is None, and the stack the same, if no output has a mask.
    """
    layers = stack.cell_tpl[-1].sub if stack.cell_tpl and is_stage(stack.cell_tpl[-1]) else []
    cell = getattr(layers[-1], "layer", None) if layers else None
    if not isinstance(cell, _Cell):
        return stack, None
    if all(mask_of(output) is None for output in keras.tree.flatten(cell.nesting)):
        return stack, None
    stack = stack.Copy()
    stack.cell_tpl[-1].sub[-1].layer = dataclasses.replace(cell, gives_masks=True)
    return stack, cell.nesting


def with_masks(nesting: Any, results: Sequence[Any]) -> Any:
    """Nests the results of a stack as a model does. The second half are masks."""
    half = len(results) // 2
    pairs = zip(results[:half], results[half:], strict=True)
    masked = [value if mask is None else with_mask(value, mask) for value, mask in pairs]
    return keras.tree.pack_sequence_as(nesting, masked)


def _functional(model: Any) -> Any:
    """Returns the functional model of a model, which knows the calls of its layers."""
    if isinstance(model, keras.Sequential):
        functional = functional_of(model)
        if functional is None:
            raise PipelineError(
                f"Sequential {model.name!r} does not know the shape of its input; begin it with "
                "keras.Input(shape)"
            )
        return functional
    if not is_functional(model):
        raise PipelineError(
            f"{with_article(type(model).__name__)} is no functional or sequential Keras model, so "
            "the order of its layers is not known; give a keras.Model(inputs, outputs), or use the "
            "whole as one KerasLayer"
        )
    return model


def _calls_of(model: Any) -> tuple[tuple[int, ...], list[_Call], list[int]]:
    """Returns the numbers of inputs, the calls of a model, and the numbers of its results."""
    calls: list[_Call] = []
    numbers: dict[int, int] = {}
    count = iter(range(1 << 30))

    def number(tensor: Any) -> int:
        return numbers.setdefault(id(tensor), next(count))

    def visit(model: Any, given: Sequence[int] | None) -> list[int]:
        model = _functional(model)
        of_model: dict[int, int] = {}
        for position, tensor in enumerate(model.inputs):
            of_model[id(tensor)] = number(tensor) if given is None else given[position]
        for node in calls_in_order(model):
            refs = [of_model.get(id(tensor)) for tensor in node.input_tensors]
            if node.operation is None or node.is_input or None in refs:
                continue

            def ref(value: Any) -> Any:
                is_tensor = isinstance(value, keras.KerasTensor)
                return _Ref(of_model[id(value)]) if is_tensor else value

            arguments: Any = (node.arguments.args, node.arguments.kwargs)
            args, kwargs = _filled(arguments, ref)
            inner = node.operation
            if isinstance(inner, keras.Sequential) or is_functional(inner):
                outputs = visit(inner, _numbers(args))
            else:
                outputs = [next(count) for _ in node.outputs]
                calls.append(_Call(inner, args, kwargs, tuple(outputs)))
            of_model.update(zip(map(id, node.outputs), outputs, strict=True))
        return [of_model[id(tensor)] for tensor in model.outputs]

    results = visit(model, None)
    functional = _functional(model)
    return tuple(number(tensor) for tensor in functional.inputs), calls, results


def _numbers(nested: Any) -> list[int]:
    """Returns the numbers of all tensors in arguments."""
    found: list[int] = []

    def visit(value: Any) -> None:
        if isinstance(value, _Ref):
            found.append(value.number)
        elif isinstance(value, dict):
            for key in sorted(value):
                visit(value[key])
        elif isinstance(value, list | tuple):
            for part in value:
                visit(part)

    visit(nested)
    return found


def _variables(cell: _Cell) -> list[Any]:
    return [variable for call in cell.calls for variable in getattr(call.operation, "weights", ())]


def _check_apart(model: Any, cells: Sequence[_Cell]) -> None:
    """Checks that no layer with weights is in two cells."""
    owners: dict[int, tuple[_Cell, _Call]] = {}
    for cell in cells:
        for call in cell.calls:
            for variable in getattr(call.operation, "weights", ()):
                owner, first = owners.setdefault(id(variable), (cell, call))
                if owner is not cell:
                    names = dict.fromkeys(repr(c.operation.name) for c in (first, call))
                    raise PipelineError(
                        f"model {model.name!r} uses the weight {variable.path!r} of layer "
                        f"{' and '.join(names)} in two places, which may lie on two stages; make "
                        "a layer for each place, or use the whole model as one KerasLayer"
                    )


class _Part(keras.Layer):
    """The layers of a cell. Tensors come and go with their masks."""

    def __init__(self, cell: _Cell) -> None:
        # Its layers cast what they get, each to a dtype of its own.
        super().__init__(name="part", dtype=cell.policy, autocast=False)
        self._takes, self._gives, self._nesting = cell.takes, cell.gives, cell.nesting
        self._is_first, self._gives_masks = cell.is_first, cell.gives_masks
        self._parts = [call.operation for call in cell.calls]
        self.kind = " and ".join(dict.fromkeys(type(part).__name__ for part in self._parts))
        self._calls = [(call.args, call.kwargs, call.outputs) for call in cell.calls]
        self.supports_masking = self.built = True

    def compute_mask(self, *_: Any) -> None:
        """Leaves the masks that the layers give."""

    def call(self, *values: Any, training: Any = None) -> Any:
        """Calls the layers one after the other."""
        known: dict[int, Any] = dict(zip(self._takes, values, strict=False))
        if not self._is_first:
            for number, mask in zip(self._takes, values[len(self._takes) :], strict=True):
                if mask is not None:
                    known[number] = with_mask(known[number], mask)

        def value(ref: Any) -> Any:
            return known[ref.number] if isinstance(ref, _Ref) else ref

        for part, (args, kwargs, outputs) in zip(self._parts, self._calls, strict=True):
            options = _filled(kwargs, value)
            # Otherwise a layer would keep the value that the model was made with.
            if training is not None and takes_training(part):
                options["training"] = training
            results = keras.tree.flatten(part(*_filled(args, value), **options))
            known.update(zip(outputs, results, strict=True))
        results = [known[number] for number in self._gives]
        if self._nesting is not None and not self._gives_masks:
            return keras.tree.pack_sequence_as(self._nesting, results)
        return (*results, *map(mask_of, results))


def _filled(nested: Any, value: Callable[[Any], Any]) -> Any:
    """Replaces each value in arguments."""
    if isinstance(nested, dict):
        return {key: _filled(part, value) for key, part in nested.items()}
    if isinstance(nested, list | tuple) and not isinstance(nested, _Ref):
        return type(nested)(_filled(part, value) for part in nested)
    return value(nested)
