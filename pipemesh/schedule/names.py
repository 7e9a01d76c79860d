"""The names of pipeline schedules: every accepted spelling, for builders, flags and params."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from pipemesh.errors import ScheduleError
from pipemesh.text import did_you_mean

FILE = "file"
EQUAL_WORK = "equal_work"
SEARCHED = "list_schedule"


@dataclasses.dataclass(frozen=True)
class ScheduleName:
    """A schedule by name."""

    summary: str  # For help pages.
    short: str = ""  # Another spelling, or nothing.
    stages_a_device: int = 1  # Or the default where the caller may choose.
    is_open: bool = False  # The number of stages a device may follow after a colon.
    trains: bool = True  # It has backward actions.
    # Default number of slices of every sequence, where a number may follow a colon.
    num_slices: int = 1

    @property
    def number(self) -> str:
        """The noun of the number after a colon; empty if there is none."""
        if self.num_slices > 1:
            return "slices"
        return "stages a device" if self.is_open else ""


NAMES: Mapping[str, ScheduleName] = MappingProxyType(
    {
        "gpipe": ScheduleName("all forward passes, then all backward ones"),
        "one_f_one_b": ScheduleName("a forward and a backward in turn", "1f1b"),
        "interleaved_one_f_one_b": ScheduleName(
            "1f1b with V stages a device", "interleaved", 2, True
        ),
        "seq_one_f_one_b": ScheduleName(
            "1f1b on Q slices of every sequence", "seq1f1b", num_slices=4
        ),
        "looped_bfs": ScheduleName("gpipe with V stages a device", "", 2, True),
        "zb_h1": ScheduleName("zero bubble, memory as 1f1b"),
        "zb_h2": ScheduleName("zero bubble, twice the memory"),
        "zb_v": ScheduleName("zero bubble, 2 stages a device in a V", "v_zb", 2),
        "v_half": ScheduleName("half the memory of 1f1b, 2 stages a device in a V", "", 2),
        "v_min": ScheduleName("a third of it, 2 stages a device in a V", "", 2),
        "dual_pipe_v": ScheduleName("forward beside backward, 2 stages a device in a V", "", 2),
        "forward_only": ScheduleName("no training; V stages a device", "", 1, True, trains=False),
        "decode": ScheduleName("V tokens of each group of prompts", "", 4, True, trains=False),
    }
)
"""Every published schedule, by its name in `pipemesh.schedule`."""

_CANONICAL = {
    spelling: name for name, known in NAMES.items() for spelling in (name, known.short) if spelling
}


@dataclasses.dataclass(frozen=True)
class ParsedName:
    """A parsed name."""

    name: str  # A key of `NAMES`, or `FILE`, or `SEARCHED`.
    stages_a_device: int | None = None  # The number after the colon, if any.
    rest: str = ""  # The path of a file.
    num_slices: int | None = None  # The number after the colon of a schedule with slices.
    equal_work: bool = False  # Slices take the same work, instead of having the same length.

    def stages(self) -> int:
        """Returns the stages a device: the given number, or the schedule's default."""
        return self.stages_a_device or NAMES[self.name].stages_a_device

    def slices(self) -> int:
        """Returns the number of slices: the given one, or the schedule's default."""
        return self.num_slices or NAMES[self.name].num_slices


def parse(text: object, for_layers: bool = False) -> ParsedName:
    """Parses a key of `NAMES` or its short form, `file:` and a path, or `list_schedule`."""
    # Case does not matter, nor `-` or `_`. With `for_layers` errors offer only schedules that train
    # a stack of layers.
    if not isinstance(text, str):
        raise ScheduleError(
            f"a schedule has a text as name, not {text!r}; there are {listing(for_layers)}"
        )
    word, colon, rest = text.strip().partition(":")
    word = word.lower().replace("-", "_")
    if word == FILE:
        return ParsedName(FILE, rest=rest)
    name = SEARCHED if word == SEARCHED else _CANONICAL.get(word)
    if name is None:
        spellings = [s for s, n in _CANONICAL.items() if NAMES[n].trains or not for_layers]
        spellings += [FILE] if for_layers else [FILE, SEARCHED]
        hint = did_you_mean(word, spellings, cutoff=0.5)
        raise ScheduleError(f"unknown schedule {text!r}; {hint}there are {listing(for_layers)}")
    if not colon:
        return ParsedName(name)
    known = NAMES.get(name)
    number, _, suffix = rest.partition(":")
    equal_work = suffix.lower().replace("-", "_") == EQUAL_WORK
    if equal_work and known is not None and known.num_slices > 1:
        rest = number
    if known is None or not known.number:
        why = f"always has {known.stages_a_device} stages a device" if known else "takes no number"
        raise ScheduleError(f"schedule {text!r}: {word} {why}; write {word!r}")
    if not (rest.isascii() and rest.isdigit() and len(rest) < 10 and int(rest) > 0):
        raise ScheduleError(
            f"schedule {text!r}: {rest!r} is not a number of {known.number}; write for example "
            f"'{word}:2'" + (f" or '{word}:2:{EQUAL_WORK}'" if known.num_slices > 1 else "")
        )
    if known.num_slices > 1:
        return ParsedName(name, num_slices=int(rest), equal_work=equal_work)
    return ParsedName(name, int(rest))


def agreed_stages(text: str, parsed: ParsedName, num_virtual_stages: int | None) -> int | None:
    """Returns the stages a device from the name or from beside it; None if neither has them."""
    named = parsed.stages_a_device
    if named is not None and num_virtual_stages not in (None, named):
        raise ScheduleError(
            f"schedule {text!r} has {named} stages a device, but num_virtual_stages is "
            f"{num_virtual_stages}; give one of them"
        )
    return named if num_virtual_stages is None else num_virtual_stages


def listing(for_layers: bool = False) -> str:
    """Returns all spellings on one line, each schedule once, or those that train layers alone."""
    names = [name for name, known in NAMES.items() if known.trains or not for_layers]
    return ", ".join([*map(_spelling, names), "file:PATH", *([] if for_layers else [SEARCHED])])


def help_text() -> str:
    """Returns all spellings for help pages, one schedule a line.

    Example:
        >>> print(help_text().splitlines()[1])
          1f1b (or one_f_one_b)                        a forward and a backward in turn
    """
    rows: list[tuple[str, str]] = []
    for name, known in NAMES.items():
        default = known.num_slices if known.num_slices > 1 else known.stages_a_device
        number = f" ({default} by default)" if known.number else ""
        rows.append((_spelling(name), known.summary + number))
        if known.num_slices > 1:
            rows.append((f"{known.short}:Q:{EQUAL_WORK}", "the same on slices of equal work"))
    rows.append(("file:PATH", "a table of `pipemesh schedule --csv` or `--text`"))
    rows.append((SEARCHED, "searched for costs, by `pipemesh schedule` alone"))
    return "\n".join(f"  {spelling:44} {what}" for spelling, what in rows)


def _spelling(name: str) -> str:
    known = NAMES[name]
    number = {"slices": ":Q", "": ""}.get(known.number, ":V")
    return f"{known.short}{number} (or {name}{number})" if known.short else name + number
