"""A registered model, measured and timed by a program that does nothing else."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipemesh.errors import PlanError
from pipemesh.plan import Plan
from pipemesh.plan.figures import Figures

if TYPE_CHECKING:
    # This loads lingvo, which must not happen before devices exist.
    from pipemesh.training.measuring.measure import Make


class RegisteredSteps:
    """Steps of a registered model under plans; create it before TensorFlow starts.

    Progress goes to standard error.

    Raises:
        PlanError: devices are missing, or the model does not follow the partition of a plan.
        PipemeshError: there is no such model, or TensorFlow has started.
    """

    def __init__(self, name: str, num_devices: int, device_type: str = "CPU") -> None:
        self._make = _started(name, num_devices, device_type)
        self._devices = num_devices
        self._batch = next(iter(self._make(Plan()).train_data(0)))

    def figures(self) -> Figures:
        """Returns the model's figures; see `measure`."""
        from pipemesh.training.measuring.measure import measure

        return measure(self._make, self._batch, self._devices, _say)

    def seconds(self, plans: Sequence[Plan]) -> list[float]:
        """Returns the seconds of a step under each plan, infinite for an impossible plan."""
        from pipemesh.training.measuring.measure import seconds_of

        return seconds_of(self._make, self._batch, plans, _say)

    @property
    def rows(self) -> int:
        """Returns the number of examples in a batch of the model."""
        from pipemesh.training.subject import rows_of

        return rows_of(self._batch)


def _started(name: str, num_devices: int, device_type: str) -> Make:
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
    elif num_devices > (found := len(tf.config.list_physical_devices("GPU"))):
        raise PlanError(
            f"--devices={num_devices}, but {found} GPUs exist; use fewer, or --device_type=CPU"
        )
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
        return RegisteredModel(config(), name, plan.to_values(), device_type=device_type)

    return make


def _say(text: str) -> None:
    print(f"measuring {text}", file=sys.stderr, flush=True)
