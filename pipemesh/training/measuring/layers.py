"""What each layer of a model takes and holds, measured with every layer a stage of its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.static_shape import num_bytes
from pipemesh.errors import PlanError
from pipemesh.layers.named.named_layer import NamedLayer
from pipemesh.plan import Plan
from pipemesh.plan.layer_figures import Curve, LayerFigures
from pipemesh.recurrent.memory import StageMemory
from pipemesh.schedule import Schedule
from pipemesh.training.measuring.timed_step import TimedStep
from pipemesh.training.subject import Subject

# Dims whose slices devices compute on their own, and add up once.
SPLIT = ("heads", "d_ff", "vocab", "experts")
AXIS = "model"
# Microbatches a step, so that not every action is the first of its kind, and steps.
_MICROBATCHES, _STEPS = 2, 6

Make = Callable[[Plan], Subject]
"""A model under a plan."""


class MeasuredLayers:
    """Times and sizes of all layers of a model, on its first device.

    Args:
        make: the model under a plan.
        batch: one of its batches.
        rows: that microbatches have, rising.
        say: is told what is being measured.

    Attributes:
        layers: figures of each, first to last.
        rules: what of them devices can share, as rules of a layout.
        optimizer: bytes of the optimizer's state for each byte of weights.

    Raises:
        PlanError: the model does not cut its layers as plans say, or has no pipeline.
    """

    def __init__(
        self, make: Make, batch: Any, rows: Sequence[int], say: Callable[[str], None]
    ) -> None:
        number = number_of_layers(make)
        middle = rows[len(rows) // 2]
        # Halves of a backward pass, and those that compute again, are to the whole as at one size.
        cases = [("B", "none", size) for size in rows]
        cases += [("IW", "none", middle), ("B", "full", middle), ("IW", "full", middle)]
        steps: list[TimedStep] = []
        for kinds, remat, size in cases:
            say(f"{number} layers, {size} rows, {kinds}, remat {remat}")
            plan = _plan(number, kinds, remat)
            of_size = with_rows(batch, size * _MICROBATCHES)
            steps.append(TimedStep(make(plan), of_size, clocked=True))
        seconds: list[dict[str, dict[int, float]]] = [{} for _ in range(number)]
        # In turn: what else runs on the machine makes all of them longer alike.
        for _, (step, (_, remat, size)) in itertools.product(
            range(_STEPS), zip(steps, cases, strict=True)
        ):
            step.run()
            for action, took in step.durations().items():
                kind, again = action.kind, remat == "full"
                if kind != "F" or not again:
                    own = seconds[action.stage].setdefault(f"{kind}+" if again else kind, {})
                    # Other work makes actions longer, and nothing makes them shorter.
                    own[size] = min(own.get(size, math.inf), took)
        step = steps[0]
        sizes = [(size, each.memory[0].stages) for size, each in zip(rows, steps, strict=False)]
        cells = [step.stack.children[cell.name] for cell in step.stack.params.cell_tpl]
        dims = [_dims(cell) for cell in cells]
        self.rules = ";".join(f"{dim}:{AXIS}" for dim in SPLIT if any(dim in of for of in dims))
        variables = step.trained.learner.GetTrainableVariables(step.trained.task.vars).Flatten()
        self.optimizer = num_bytes(step.trained.optimizer_variables()) / num_bytes(variables)
        self.layers = [
            _figures(
                step.stack.params.cell_tpl[layer].sub[0].name,
                seconds[layer],
                middle,
                num_bytes(cells[layer].vars.Flatten()),
                [(size, stages[layer]) for size, stages in sizes],
                dims[layer],
            )
            for layer in range(number)
        ]


def _plan(number: int, kinds: str, remat: str) -> Plan:
    """Every layer a stage, all of them on one device."""
    row: list[str] = []
    for m in range(_MICROBATCHES):
        row += [f"{s}F{m}" for s in range(number)]
        row += [f"{s}{kind}{m}" for s in reversed(range(number)) for kind in kinds]
    return Plan(
        schedule=Schedule.from_text(f"0: {' '.join(row)}"),
        num_microbatches=_MICROBATCHES,
        remat=remat,
        boundaries=tuple(range(number + 1)),
    )


def number_of_layers(make: Make) -> int:
    """How many layers a model's pipeline has.

    Args:
        make: the model under a plan.

    Raises:
        PlanError: it does not cut its layers as plans say, or has no pipeline.
    """
    from pipemesh.training.registered import stacks_of

    subject = make(Plan())
    stacks = stacks_of(subject.task())
    if len(stacks) != 1:
        raise PlanError(
            f"{subject.name} has {len(stacks)} pipelines; figures are of a model that has one"
        )
    stages = stacks[0].cell_tpl
    if len(stages) != 1 or "sub" not in stages[0]:
        raise PlanError(
            f"{subject.name} cuts its layers itself, so they cannot be measured one by one; give "
            "the class an attribute PLAN = pipemesh.plan.Plan() and let Task() cut them as "
            "self.PLAN says"
        )
    return len(stages[0].sub)


def with_rows(batch: Any, rows: int) -> Any:
    """A batch with so many rows, which are repeated if there are not enough.

    Args:
        batch: nested tensors.
        rows: at least 1.
    """

    def some(x: tf.Tensor) -> tf.Tensor:
        times = -(-rows // int(x.shape[0] or 1))
        return tf.concat([x] * times, 0)[:rows]

    return tf.nest.map_structure(some, batch)


def _figures(
    name: str,
    seconds: dict[str, dict[int, float]],
    middle: int,
    parameter_bytes: int,
    sizes: Sequence[tuple[int, StageMemory]],
    dims: dict[str, int],
) -> LayerFigures:
    curves = {kind: list(seconds[kind].items()) for kind in ("F", "B")}
    for kind in ("I", "W", "B+", "I+", "W+"):
        # A layer without weights has no `W`.
        share = seconds.get(kind, {middle: 0.0})[middle] / seconds["B"][middle]
        curves[kind] = [(size, base * share) for size, base in curves["B"]]

    def curve(of: Callable[[StageMemory], float]) -> Curve:
        return Curve(tuple((size, of(memory)) for size, memory in sizes))

    split = math.gcd(*dims.values()) if dims else 1
    outputs = curve(lambda memory: num_bytes(memory.outputs))
    return LayerFigures(
        name,
        {kind: Curve(tuple(points)) for kind, points in curves.items()},
        parameter_bytes,
        curve(lambda memory: memory.kept),
        outputs,
        # As many sums of what goes on to the next layer as there are dims that are split.
        summed=Curve(tuple((x, y * len(dims)) for x, y in outputs.points)) if dims else None,
        sums=max(1, len(dims)),
        split=split,
    )


def _dims(layer: Any) -> dict[str, int]:
    """Sizes of the dims of a layer's weights that can be split."""
    found: dict[str, int] = {}
    for each in _all(layer):
        if isinstance(each, NamedLayer):
            for shape in each.named_shapes.values():
                found |= {dim.name: dim.size for dim in shape.dims if dim.name in SPLIT}
    return found


def _all(layer: Any) -> Iterator[Any]:
    yield layer
    for child in layer.children.values():
        for each in child if isinstance(child, list | tuple) else [child]:
            yield from _all(each)
