"""Which change of a plan would have made a measured step shorter: each is simulated, none is run.

The step that was timed corrects the figures of the model's layers, or makes some from their flops;
with those `pipemesh.plan.predict` says what a step under another plan takes.

Example:
    >>> from pipemesh.plan import Figures, Plan
    >>> from pipemesh.plan.figures import figures_of_costs
    >>> from pipemesh.partition import LayerCost
    >>> from pipemesh.schedule import Costs, one_f_one_b, simulate
    >>> flops = Figures(tuple(figures_of_costs([LayerCost(1.0)] * 2, rows=4)))
    >>> plan = Plan("layers:2", num_microbatches=2, remat="none")
    >>> step = simulate(one_f_one_b(2, 2), Costs(0.1, 0.2))
    >>> figures = corrected(flops, plan, 8, step, seconds=1.0)
    >>> best = changes(plan, figures, 8, knows_rows=False, knows_links=False)[0]
    >>> best.flags, round(best.prediction.seconds, 3)
    ('--num_microbatches=8', 0.775)
"""

from pipemesh.report.change.basis import Basis, basis_of
from pipemesh.report.change.changes import Change, changes
from pipemesh.report.change.corrected import corrected

__all__ = ["Basis", "Change", "basis_of", "changes", "corrected"]
