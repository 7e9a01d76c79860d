"""The builders by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from pipemesh.errors import ScheduleError
from pipemesh.schedule.builders.all_forward import decode, forward_only, gpipe, looped_bfs
from pipemesh.schedule.builders.one_f_one_b import interleaved_one_f_one_b, one_f_one_b
from pipemesh.schedule.builders.repeated import v_half, v_min
from pipemesh.schedule.builders.sliced import seq_one_f_one_b
from pipemesh.schedule.builders.v_shaped import dual_pipe_v, zb_v
from pipemesh.schedule.builders.zero_bubble import zb_h1, zb_h2
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule_names import FILE, NAMES, agreed_stages, parse


@dataclasses.dataclass(frozen=True)
class Builder:
    """A named builder and how many stages it puts on a device.

    Attributes:
        function: takes device and microbatch counts, and `num_virtual_stages` if it is open.
        virtual_stages: stages a device, or the default where the caller may choose.
        takes_virtual_stages: whether the caller may choose.
        trains: whether it goes backward, too.
        num_slices: into how many slices it cuts sequences by default; 1 if it does not.
    """

    function: Callable[..., Schedule]
    virtual_stages: int = 1
    takes_virtual_stages: bool = False
    trains: bool = True
    num_slices: int = 1


_FUNCTIONS: tuple[Callable[..., Schedule], ...] = (
    gpipe,
    one_f_one_b,
    interleaved_one_f_one_b,
    looped_bfs,
    zb_h1,
    zb_h2,
    zb_v,
    v_half,
    v_min,
    dual_pipe_v,
    forward_only,
    decode,
)


def _builder(function: Callable[..., Schedule]) -> Builder:
    known = NAMES[function.__name__]
    return Builder(function, known.stages_a_device, known.is_open, known.trains, known.num_slices)


BUILDERS: dict[str, Builder] = {f.__name__: _builder(f) for f in _FUNCTIONS}
"""Every published schedule of whole sequences by its name: any stages can be run by it."""
SLICED: dict[str, Builder] = {f.__name__: _builder(f) for f in (seq_one_f_one_b,)}
"""Those that cut sequences into slices, which only some stages take."""


def build(
    name: str, num_devices: int, num_microbatches: int, num_virtual_stages: int | None = None
) -> Schedule:
    """Builds a published schedule by name.

    Args:
        name: as in `pipemesh.schedule_names`, for example `1f1b`, `interleaved:2` or
            `seq1f1b:4`, of which the number is that of slices.
        num_devices: at least 1.
        num_microbatches: at least 1.
        num_virtual_stages: stages a device; by default what the name says, or else what the
            builder has as default.

    Returns:
        The validated schedule.

    Raises:
        ScheduleError: the name is unknown (suggests the nearest), a count is bad, the schedule
            fixes another number of virtual stages, or the name says another one.

    Example:
        >>> build("zb_h1", 4, 8).num_devices
        4
    """
    parsed = parse(name)
    if parsed.name not in BUILDERS and parsed.name not in SLICED:
        raise ScheduleError(
            f"schedule {name!r} is not built from counts alone; "
            + ("use ScheduleSpec.from_text" if parsed.name == FILE else "use list_schedule(costs)")
        )
    builder = BUILDERS.get(parsed.name) or SLICED[parsed.name]
    number = agreed_stages(name, parsed, num_virtual_stages)
    if number in (None, 1) and builder.num_slices > 1:
        return builder.function(num_devices, num_microbatches, parsed.slices())
    if number is None:
        return builder.function(num_devices, num_microbatches)
    if builder.takes_virtual_stages:
        return builder.function(num_devices, num_microbatches, number)
    if number != builder.virtual_stages:
        raise ScheduleError(
            f"num_virtual_stages is {number}, but {parsed.name} has always "
            f"{builder.virtual_stages} a device; leave it out"
        )
    return builder.function(num_devices, num_microbatches)
