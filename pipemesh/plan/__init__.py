"""The plan of a run as one value, its forecast, and the search for the best one.

Pure Python: importing this room loads neither TensorFlow nor lingvo.

Example:
    >>> from pipemesh.plan import Plan
    >>> plan = Plan.from_text("mesh=layers:2;data:2 layout=batch:data num_microbatches=4")
    >>> plan.num_replicas, plan.home(1), plan.table.num_stages
    (2, (2, 3), 2)
    >>> Plan.from_text(str(plan)) == plan
    True
"""

from pipemesh.plan.figures import Figures, figures_of_costs
from pipemesh.plan.machine import Machine
from pipemesh.plan.network import Link, Network
from pipemesh.plan.plan import Plan
from pipemesh.plan.predict import Prediction, predict
from pipemesh.plan.remat import Remat
from pipemesh.plan.search import SearchSpace, search

__all__ = [
    "Figures",
    "Link",
    "Machine",
    "Network",
    "Plan",
    "Prediction",
    "Remat",
    "SearchSpace",
    "figures_of_costs",
    "predict",
    "search",
]
