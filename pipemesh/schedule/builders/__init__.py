"""Every published schedule as a function from counts to a validated table.

All take `(num_devices, num_microbatches)`, and `num_virtual_stages` (stages a device) where the
schedule leaves it open. In the docstrings `D` is the number of devices, `M` of microbatches and
`V` of virtual stages; `f`, `b`, `i` and `w` are the durations of one action of one stage: forward,
full backward, input gradient and weight gradient. Bubbles are idle time of one device, peak
activations count (stage, microbatch) pairs of one device between the start of `F` and the end
of `B` or `W`. Transfers are free in every formula.

Example:
    >>> from pipemesh.schedule.builders import BUILDERS, build
    >>> sorted(BUILDERS)[:3]
    ['decode', 'dual_pipe_v', 'forward_only']
    >>> build("one_f_one_b", 2, 2).num_stages
    2
"""

from pipemesh.schedule.builders.all_forward import decode, forward_only, gpipe, looped_bfs
from pipemesh.schedule.builders.one_f_one_b import interleaved_one_f_one_b, one_f_one_b
from pipemesh.schedule.builders.registry import BUILDERS, Builder, build
from pipemesh.schedule.builders.repeated import v_half, v_min
from pipemesh.schedule.builders.sliced import seq_one_f_one_b
from pipemesh.schedule.builders.v_shaped import dual_pipe_v, zb_v
from pipemesh.schedule.builders.zero_bubble import zb_h1, zb_h2

__all__ = [
    "BUILDERS",
    "Builder",
    "build",
    "decode",
    "dual_pipe_v",
    "forward_only",
    "gpipe",
    "interleaved_one_f_one_b",
    "looped_bfs",
    "one_f_one_b",
    "seq_one_f_one_b",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
