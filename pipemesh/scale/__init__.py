"""What a training would take on more devices than there are: simulated from measured figures.

Pure Python: importing this room loads neither TensorFlow nor lingvo.

Example:
    >>> from pipemesh.partition import LayerCost
    >>> from pipemesh.plan.layer_figures import figures_of_costs
    >>> from pipemesh.plan.network import Link, Network
    >>> from pipemesh.scale import Job, Reliability, forecast
    >>> layers = figures_of_costs([LayerCost(1e-3, parameter_bytes=1e6)] * 16, rows=1)
    >>> network = Network(8, Link(1e-6, 1e11), Link(1e-5, 1e10))
    >>> job = Job(tuple(layers), network, batch=256)
    >>> found = forecast(job, 64, Reliability(device=1e8, storage=1e9))
    >>> found.step.split.num_devices, 0.9 < found.goodput < 1
    (64, True)
"""

from pipemesh.scale.failures import Failures, Outcome, simulate_failures
from pipemesh.scale.forecast import Forecast, Reliability, best_step, forecast, splits
from pipemesh.scale.job import Job, Split
from pipemesh.scale.step import Step, forecast_step

__all__ = [
    "Failures",
    "Forecast",
    "Job",
    "Outcome",
    "Reliability",
    "Split",
    "Step",
    "best_step",
    "forecast",
    "forecast_step",
    "simulate_failures",
    "splits",
]
