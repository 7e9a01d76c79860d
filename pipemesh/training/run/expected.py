"""The predicted step, from measurements of the layers, and its entry in a record."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from typing import Any

from pipemesh.errors import PipemeshError
from pipemesh.plan import Figures, Prediction, predict
from pipemesh.plan.figures import FILE
from pipemesh.text import bytes_text
from pipemesh.training.run.options import Options
from pipemesh.training.run.stage_table import layers_of
from pipemesh.training.subject import rows_of
from pipemesh.training.trainer import Trainer

_NOT_MEASURED = (
    "what its layers take was not measured; do so with `pipemesh plan --model=... --save=FILE`, "
    "and give --figures=FILE"
)


@dataclasses.dataclass(frozen=True)
class Expected:
    """A prediction for a step of a run with one pipeline.

    Attributes:
        prediction: the prediction from measured layers, or None.
        why: the reason why there is no prediction; "" if there is one.
        values: values for the record.
    """

    prediction: Prediction | None
    why: str
    values: dict[str, Any]

    def __str__(self) -> str:
        """Returns text for people; "" if there is no prediction and the user gave no figures."""
        if (found := self.prediction) is not None:
            return (
                f"{1e3 * found.seconds:.4g} ms a step by what was measured of its layers, bubble "
                f"{found.bubble:.1%}, {bytes_text(max(found.memory))} on the fullest device"
                + (f"; supposed: {found.supposed}" if found.supposed else "")
            )
        return "" if self.why == _NOT_MEASURED else f"seconds are not predicted: {self.why}"


def expected(trainer: Trainer, options: Options, batch: Any) -> Expected | None:
    """Returns the prediction for a step, or None unless there is exactly one pipeline."""
    if len(trainer.trained.pipelines) != 1:
        return None
    stack: Any = trainer.trained.pipelines[0]
    plan, rows = trainer.subject.plan, rows_of(batch)
    sizes = [len(layers_of(cell)) for cell in stack.params.cell_tpl]
    cuts = (0, *itertools.accumulate(sizes))
    is_cpu = trainer.subject.device_type == "CPU"
    values: dict[str, Any] = {
        "rows": rows,
        "cuts": cuts,
        "device_memory": options.device_memory,
        # All devices of a process share them.
        "cores": os.cpu_count() if is_cpu else None,
    }
    if trainer.report is not None and trainer.report.layers:
        layers = itertools.chain.from_iterable(trainer.report.layers)
        values["layers"] = [dataclasses.asdict(layer) for layer in layers]
    prediction, why = None, _NOT_MEASURED
    try:
        if (figures := _figures(options)) is not None:
            plan = dataclasses.replace(plan, boundaries=cuts)
            prediction, why = predict(plan, figures, rows), ""
            values["figures"] = json.loads(figures.to_json())
            values["predicted"] = {
                "seconds": prediction.seconds,
                "bubble": prediction.bubble,
                "memory": prediction.memory,
                "parts": prediction.parts,
                "about": figures.about,
            }
    except PipemeshError as error:
        why = str(error)
    if why:
        values["unpredicted"] = why
    return Expected(prediction, why, values)


def _figures(options: Options) -> Figures | None:
    path = options.figures or os.path.join(options.logdir, FILE)
    there = options.figures is not None or os.path.exists(path)
    return Figures.read(path) if there else None
