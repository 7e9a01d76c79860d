"""Schedules: frozen tables of actions that are proved, simulated, searched, written and drawn.

Pure Python: importing this room loads neither TensorFlow nor lingvo. The published schedules are
in `pipemesh.schedule.builders` (and here), the drawings in `pipemesh.report`.

Example:
    >>> from pipemesh.schedule import Costs, one_f_one_b, simulate
    >>> schedule = one_f_one_b(2, 3)
    >>> print(schedule)
    0: 0F0 0F1 0B0 0F2 0B1 0B2
    1: 1F0 1B0 1F1 1B1 1F2 1B2
    >>> timeline = simulate(schedule, Costs(forward=1, backward=2))
    >>> timeline.makespan, timeline.bubble, timeline.peak_activations
    (12.0, (3.0, 3.0), (2, 1))
"""

from pipemesh.schedule.action import Action
from pipemesh.schedule.bounds import lower_bound
from pipemesh.schedule.builders import (
    build,
    decode,
    dual_pipe_v,
    forward_only,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    seq_one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from pipemesh.schedule.costs import Costs
from pipemesh.schedule.csv import from_csv, write_csv
from pipemesh.schedule.list_schedule import list_schedule, recompute
from pipemesh.schedule.optimal import Optimum, optimal_schedule
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.simulate import simulate
from pipemesh.schedule.spec import ScheduleSpec
from pipemesh.schedule.timeline import Timeline
from pipemesh.schedule.validate import execution_order, validate

__all__ = [
    "Action",
    "Costs",
    "Optimum",
    "Schedule",
    "ScheduleSpec",
    "Timeline",
    "build",
    "decode",
    "dual_pipe_v",
    "execution_order",
    "forward_only",
    "from_csv",
    "gpipe",
    "interleaved_one_f_one_b",
    "list_schedule",
    "looped_bfs",
    "lower_bound",
    "one_f_one_b",
    "optimal_schedule",
    "recompute",
    "seq_one_f_one_b",
    "simulate",
    "v_half",
    "v_min",
    "validate",
    "write_csv",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
