"""How a stack is run, as one value: printed, compared, parsed back, checked, forecast and found.

Pure Python: importing this room loads neither TensorFlow nor lingvo.

Example:
    >>> from pipemesh.plan import Plan
    >>> plan = Plan.from_text("mesh=layers:2;data:2 layout=batch:data num_microbatches=4")
    >>> plan.num_replicas, plan.home(1), plan.table.num_stages
    (2, (2, 3), 2)
    >>> Plan.from_text(str(plan)) == plan
    True
"""

from pipemesh.plan.candidates import Asked
from pipemesh.plan.figures import Figures
from pipemesh.plan.plan import Plan
from pipemesh.plan.predict import Prediction, predict
from pipemesh.plan.search import search

__all__ = ["Asked", "Figures", "Plan", "Prediction", "predict", "search"]
