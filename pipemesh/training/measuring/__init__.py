"""A registered model, measured and timed by a program that does nothing else."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from pipemesh.errors import PlanError
from pipemesh.plan import Plan
from pipemesh.training.learning import fall_later


class RegisteredSteps:
    """Steps of a registered model under plans; create it before TensorFlow starts.

    `optimizer` replaces the model's; see `pipemesh.training.learning`. `prepare` changes each new
    instance of the class, and `filters` are those of `RegisteredModel`.

    Attributes:
        rows: number of examples in a batch of the model.
        figures: returns the model's figures; see `measure`.
        seconds: returns the seconds of a step under each of some plans; see `seconds_of`.
    """

    def __init__(
        self,
        name: str,
        num_devices: int,
        device_type: str = "CPU",
        optimizer: str | None = None,
        prepare: Callable[[Any], None] = lambda config: None,
        **filters: Any,
    ) -> None:
        learning = {"optimizer": optimizer} if optimizer else {}
        make = _started(name, num_devices, device_type, learning, prepare, filters)
        # They load lingvo, which must not happen before devices exist.
        from pipemesh.training.measuring.measure import measure, seconds_of
        from pipemesh.training.subject import rows_of

        subject = make(Plan())
        data, specs = iter(subject.train_data(0)), subject.batch_specs()
        batch = next(data)
        # A plan must do for the longest rows of batches in buckets.
        while specs and _shapes(batch) != _shapes(specs[-1]):
            batch = next(data)
        self.rows = rows_of(batch)
        self.figures = functools.partial(measure, make, batch, num_devices, _say)
        self.seconds = functools.partial(seconds_of, make, batch, say=_say)


def _started(
    name: str,
    num_devices: int,
    device_type: str,
    learning: Mapping[str, Any],
    prepare: Callable[[Any], None],
    filters: Mapping[str, Any],
) -> Callable[[Plan], Any]:
    """Makes the devices, and returns a function that makes the model under a plan."""
    import tensorflow as tf
    from absl import flags, logging

    from pipemesh.backend.devices import prepare_graphs_quickly, start_cpu_devices

    with contextlib.suppress(AttributeError):
        # lingvo reads absl flags, which must be parsed.
        flags.FLAGS.mark_as_parsed()
    logging.use_absl_handler()
    logging.set_verbosity(logging.ERROR)
    prepare_graphs_quickly()
    if device_type == "CPU":
        start_cpu_devices(num_devices)
    elif num_devices > (num_gpus := len(tf.config.list_physical_devices("GPU"))):
        raise PlanError(
            f"--devices={num_devices}, but {num_gpus} GPUs exist; use fewer, or --device_type=CPU"
        )
    from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip
    from lingvo.core import py_utils

    from pipemesh.training.registered import RegisteredModel, find_model

    py_utils.SetEagerMode(True)
    config = find_model(name)
    if not isinstance(getattr(config, "PLAN", None), Plan):
        raise PlanError(
            f"--model={name!r} has no attribute PLAN, so it cuts its layers itself, and they "
            "cannot be measured one by one; give the class PLAN = pipemesh.plan.Plan() and let "
            "Task() cut them as self.PLAN says"
        )

    def make(plan: Plan) -> Any:
        own, values = config(), plan.to_values()
        prepare(own)
        fall_later(own)
        model = RegisteredModel(own, name, values, device_type=device_type, **filters)
        model.learn(learning)
        return model

    return make


def _shapes(batch: Mapping[str, Any]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in batch.items()}


def _say(text: str) -> None:
    print(f"measuring {text}", file=sys.stderr, flush=True)
