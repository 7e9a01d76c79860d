"""Layers in sequence, as one stage, and the names of the layers and weights of stages."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf
from lingvo.core import base_layer, py_utils

from pipemesh import randomness
from pipemesh.errors import PipelineError, PipemeshError
from pipemesh.layers.check_params import check_layers, check_whole, with_article
from pipemesh.layers.named import NamedLayer
from pipemesh.layers.named.scope import exported
from pipemesh.layers.step_seed import name_in_task, step_of_call, whole_batch_randomness
from pipemesh.randomness.scope import layer_aliases


class Place(NamedTuple):
    """The position of a layer in a stack."""

    # Names of the stage and of nested stages, outermost first; empty for a bare layer.
    stages: tuple[str, ...]
    name: str
    # Whether the params of its stage set the scope of its variables.
    scope_is_given: bool = False


def places_of(params: Iterable[Any], is_stage: Callable[[Any], bool]) -> list[Place]:
    """Returns the positions of all layers of stages, in order, including nested ones."""
    places: list[Place] = []

    def visit(p: Any, name: str, stages: tuple[str, ...], scope_is_given: bool) -> None:
        if not is_stage(p):
            places.append(Place(stages, name, scope_is_given))
            return
        for sub in p.sub:
            sub_name = p.variable_name_prefix + sub.name
            visit(sub, sub_name, (*stages, name), sub_name in p.child_variable_scope_override)

    for p in params:
        visit(p, p.name, (), False)
    return places


def scopes_of(places: list[Place]) -> list[tuple[str, ...]]:
    """Returns the scopes that each layer's variables need before the layer's name.

    The name of the stage is left out where the layer's name is unique, so weights are valid under
    another partition. Layers nested in a stage keep their names.
    """
    scopes = [place.stages[1:] for place in places]
    free = [i for i, place in enumerate(places) if not place.scope_is_given]
    while True:
        counts = collections.Counter((*scopes[i], places[i].name) for i in free)
        longer = [
            i
            for i in free
            if counts[(*scopes[i], places[i].name)] > 1 and scopes[i] != places[i].stages
        ]
        if not longer:
            return scopes
        for i in longer:
            scopes[i] = places[i].stages


def random_names_of(places: list[Place]) -> list[str]:
    """Returns names that key random numbers: numbered in order, independent of the stages."""
    seen: collections.Counter[str] = collections.Counter()
    names = []
    for place in places:
        number = seen[place.name]
        names.append(f"{place.name}#{number}" if number else place.name)
        seen[place.name] += 1
    return names


def check_weights_are_its_own(stack: Any, transparent: tuple[type, ...]) -> None:
    """Raises a PipelineError if a layer beside a stack shares a variable with it by name.

    Eagerly, equal names mean the same variable. Names of `transparent` layers, which are stacks and
    stages, are left out.
    """
    parent, child = stack.parent, stack
    while isinstance(parent, transparent):
        parent, child = parent.parent, parent
    if parent is None:
        return
    owners = {id(v): layer for layer in all_layers(child, skip_given=True) for v in _own(layer)}
    inside = set(map(id, all_layers(child)))
    for other in all_layers(parent):
        for variable in () if id(other) in inside else _own(other):
            if id(variable) in owners:
                name = owners[id(variable)].params.name
                raise PipelineError(
                    f"{stack.params.name}: its layer {name!r} and {other.path!r} "
                    f"would train one weight, {variable.name!r}, because the names of a pipeline "
                    "and of its stages are no part of the names of variables; give one of the "
                    "layers another name (or, to tie them, set child_variable_scope_override of "
                    "the stage)"
                )


def all_layers(root: Any, skip_given: bool = False) -> list[Any]:
    """Returns a layer and all below it, optionally without those whose scope a stage sets."""
    unique: dict[int, Any] = {}

    def visit(layer: Any) -> None:
        if id(layer) in unique:
            return
        unique[id(layer)] = layer
        given = layer.params.child_variable_scope_override if skip_given else {}
        for name, children in layer.children.items():
            if name not in given:
                for child in py_utils.Flatten(children):
                    visit(child)

    visit(root)
    return list(unique.values())


def _own(layer: Any) -> list[Any]:
    return py_utils.Flatten(layer._private_vars)


def to_tuple(value: Any) -> tuple[Any, ...]:
    """Converts a list to a tuple, and any other value to a tuple of one."""
    if isinstance(value, (list, tuple)):
        return tuple(value)
    return (value,)


@contextlib.contextmanager
def noted(stage: str, layer: str, args: tuple[Any, ...]) -> Iterator[None]:
    """Adds a layer's name and inputs to its error; Python prints this note from 3.11 on."""
    try:
        yield
    except Exception as error:
        if "cell_fn implicitly captures tensors" in str(error):
            raise PipelineError(
                f"layer {layer!r} of {stage!r}: a cell of lingvo's Recurrent uses a tensor that it "
                "is not given. If it draws random numbers (zoneout, dropout), these are keyed by "
                "the step, which is one; leave that out of the cell (zo_prob=0), or do it behind "
                "the recurrent layer"
            ) from error
        add_note = getattr(error, "add_note", None)
        if not isinstance(error, PipemeshError) and add_note is not None:
            inputs = ", ".join(map(_described, args)) or "nothing"
            add_note(f"in layer {layer!r} of {stage!r}, which was given {inputs}")
        raise


def _described(value: Any) -> str:
    if isinstance(value, tf.Tensor):
        return f"{value.dtype.name} {list(value.shape)}"
    return "None" if value is None else with_article(type(value).__name__)


class FeatureExtractionLayer(base_layer.BaseLayer):
    """A stage of a pipeline: it runs layers one after the other.

    The last `num_act_inputs` arguments are activations that earlier stages fetched. They pass
    through the stage. The activations of the stage's own `act_fetch_layers` are appended to them.

    The name of a stage is part of the names of variables only if the stack has two layers of one
    name. With `child_variable_scope_override={"block": []}` in both stages such layers are tied.

    Example:
        >>> from lingvo.core import layers
        >>> stage = FeatureExtractionLayer.Params().Set(
        ...     name="stage", sub=[layers.FetchLayer.Params().Set(name="fetch")],
        ...     act_fetch_layers=["fetch"], num_act_outputs=1)
    """

    takes_slices = True

    @classmethod
    def Params(cls) -> Any:
        """Defines `variable_name_prefix`, `sub` and the numbers of activations."""
        p = super().Params()
        p.Define("variable_name_prefix", "", "Prefix for variable names in sub layers.")
        p.Define("sub", [], "A list of layers' params.")
        p.Define("num_act_inputs", 0, "Number of activation inputs.")
        p.Define("num_act_outputs", 0, "Number of activation outputs.")
        p.Define("act_fetch_layers", [], "Names of fetch layers whose activations are appended.")
        p.Define("stage_scopes", {}, "Set by the enclosing layer: scopes of the layers' variables.")
        p.Define("random_names", {}, "Set by the enclosing layer: what random numbers go by.")
        return p

    def __init__(self, params: Any) -> None:
        # The next line copies the params, and a live layer cannot always be copied.
        check_layers(params.name, "sub", params.sub)
        super().__init__(params)
        p = self.params
        for field in ("num_act_inputs", "num_act_outputs"):
            check_whole(p.name, field, getattr(p, field), 0)
        p.act_fetch_layers = p.act_fetch_layers or []
        if isinstance(p.act_fetch_layers, str):
            raise PipelineError(
                f"{p.name}: act_fetch_layers is {p.act_fetch_layers!r}; it must be a list of "
                f"names: [{p.act_fetch_layers!r}]"
            )
        expected = p.num_act_inputs + len(p.act_fetch_layers)
        if p.num_act_outputs != expected:
            raise PipelineError(
                f"{p.name}: num_act_outputs is {p.num_act_outputs}; with {p.num_act_inputs} "
                f"num_act_inputs and {len(p.act_fetch_layers)} act_fetch_layers it must be "
                f"{expected}"
            )
        if not p.stage_scopes:
            (p,), _ = with_distinct_names([p])
            self._params = p
        self._names = []
        for sub in p.sub:
            sub.name = p.variable_name_prefix + sub.name
            self.CreateChild(sub.name, sub)
            self._names.append(sub.name)
        if unknown := [name for name in p.act_fetch_layers if name not in self.children]:
            raise PipelineError(
                f"{p.name}: act_fetch_layers names {unknown}, but the layers are "
                f"{list(self._names)}"
            )

    def _child_variable_scope_override(self) -> dict[str, list[Any]]:
        return {**self.params.stage_scopes, **super()._child_variable_scope_override()}

    def FProp(self, theta: Any, *args: Any) -> Any:
        """Runs the layers on inputs and activations; returns outputs and activations, or one."""
        p = self.params
        outputs, fetched = self._split_activations(p, args)
        # Outside a pipeline it is a stack.
        stack = None if randomness.is_active() else name_in_task(self)
        with (
            whole_batch_randomness(step_of_call(self)),
            layer_aliases(p.random_names, stack),
        ):
            for name in self._names:
                child = self.children[name]
                values = to_tuple(outputs)
                if isinstance(child, FeatureExtractionLayer):
                    outputs = child.FProp(theta[name], *values)
                    continue
                if not isinstance(child, NamedLayer):
                    # A plain layer computes on one device.
                    values = exported(values)
                with randomness.layer_scope(name), noted(p.name, name, values):
                    outputs = child.FProp(theta[name], *values)
        for name in p.act_fetch_layers:
            child = self.children[name]
            if not hasattr(child, "activation"):
                raise PipelineError(
                    f"{p.name}: act_fetch_layers names {name!r}, but a {type(child).__name__} "
                    "keeps no activation to fetch; put a lingvo.core.layers.FetchLayer after it "
                    "and name that"
                )
            fetched += to_tuple(child.activation)[:1]
        return to_tuple(outputs) + fetched if fetched else outputs

    @staticmethod
    def _split_activations(p: Any, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
        if len(args) <= p.num_act_inputs:
            raise PipelineError(
                f"{p.name}: got {len(args)} arguments, of which {p.num_act_inputs} are activations "
                "(num_act_inputs); at least one more is needed"
            )
        split = len(args) - p.num_act_inputs
        return args[:split], args[split:]

    @classmethod
    def FPropMeta(cls, p: Any, *args: Any) -> Any:
        """Returns flops and output shapes for the shapes of the inputs."""
        shapes, fetched = cls._split_activations(p, args)
        flops = 0
        fetched_shapes = {}
        for sub in p.sub:
            meta = sub.cls.FPropMeta(sub, *shapes)
            fetched_shapes[sub.name] = meta.out_shapes[0]
            flops += meta.flops
            shapes = meta.out_shapes
        fetched += tuple(fetched_shapes[name] for name in p.act_fetch_layers or ())
        return py_utils.NestedMap(flops=flops, out_shapes=tuple(shapes) + fetched)


def is_stage(params: Any) -> bool:
    """Returns whether params are those of a `FeatureExtractionLayer`."""
    return issubclass(params.cls, FeatureExtractionLayer)


def with_distinct_names(params: list[Any]) -> tuple[list[Any], list[str]]:
    """Copies params with distinct names; also names the random numbers of bare layers."""
    # With all layers inside.
    params = [p.Copy() for p in params]
    places = places_of(params, is_stage)
    names = iter(zip(scopes_of(places), random_names_of(places), strict=True))

    def visit(p: Any) -> str:
        if not is_stage(p):
            return next(names)[1]
        p.stage_scopes, p.random_names = {}, {}
        for sub in p.sub:
            name = p.variable_name_prefix + sub.name
            if is_stage(sub):
                p.stage_scopes[name] = []
                visit(sub)
                continue
            scope, p.random_names[name] = next(names)
            p.stage_scopes[name] = [py_utils.SanitizeScopeKey(stage) for stage in scope]
        return p.name

    return params, [visit(p) for p in params]
