"""Kinds of actions, and where the values lie that they hand to each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipemesh.recurrent.remat import FULL, Mode
from pipemesh.recurrent.table.kinds import GRADS, OUTPUTS, Channel, given, taken
from pipemesh.recurrent.table.lists import Key, Lists
from pipemesh.schedule import Action


class Code(NamedTuple):
    """A kind of action; which microbatch it is for is data."""

    kind: str
    stage: int
    mode: Mode


@dataclasses.dataclass(frozen=True, eq=False)
class Role:
    """What an action of a kind has to do with others; there is one of each kind.

    Attributes:
        code: its kind.
        takes: the lists of its home that it takes a value from.
        puts: the lists of its home that it puts one into.
        hears: the channels of other homes that it uses a value of.
        tells: the channels whose values it sends to another home.
    """

    code: Code
    takes: tuple[Key, ...]
    puts: tuple[Key, ...]
    hears: tuple[Channel, ...]
    tells: tuple[Channel, ...]


class Roles:
    """The roles of all actions of a run.

    Args:
        order: all of them, in order.
        stage_devices: for each stage the number of its home.
        modes: of remat, for each stage and microbatch.
    """

    def __init__(
        self,
        order: Sequence[Action],
        stage_devices: Sequence[int],
        modes: Mapping[tuple[int, int], Mode],
    ) -> None:
        self._homes = stage_devices
        self._modes = modes
        self._found: dict[tuple[str, int, str], Role] = {}
        # What nobody takes is not kept: the backward pass's share of a forward-only table.
        self._taken: set[Channel] = set()
        codes = {
            Code(action.kind, action.stage, modes[action.stage, action.microbatch])
            for action in order
        }
        for code in codes:
            self._taken.update(self._needs(code))

    def of(self, action: Action) -> Role:
        """The role of an action."""
        mode = self._modes[action.stage, action.microbatch]
        key = action.kind, action.stage, mode.name
        if key not in self._found:
            self._found[key] = self._role(Code(action.kind, action.stage, mode))
        return self._found[key]

    def leaves(self, channel: Channel) -> bool:
        """Whether it comes out of the pipeline, where no action takes it."""
        return channel in (Channel(OUTPUTS, len(self._homes) - 1), Channel(GRADS, 0))

    def user(self, channel: Channel) -> int:
        """The stage that takes what the stage of a channel hands to another one."""
        return channel.stage + (1 if channel.kind == OUTPUTS else -1)

    def _role(self, code: Code) -> Role:
        needed = self._needs(code)
        made = [
            channel
            for channel in given(code.kind, code.stage)
            if channel in self._taken or self.leaves(channel)
        ]

        def local(channels: Sequence[Channel]) -> tuple[Key, ...]:
            own = [channel for channel in channels if not self._crosses(channel)]
            return tuple(Lists.key(*channel, code.mode) for channel in own)

        return Role(
            code,
            local(needed),
            local(made),
            tuple(filter(self._crosses, needed)),
            tuple(filter(self._crosses, made)),
        )

    def _crosses(self, channel: Channel) -> bool:
        if channel.kind not in (OUTPUTS, GRADS) or self.leaves(channel):
            return False
        return self._homes[channel.stage] != self._homes[self.user(channel)]

    def _needs(self, code: Code) -> list[Channel]:
        channels = taken(code.kind, code.stage, code.mode.is_apart)
        return [channel for channel in channels if 0 <= channel.stage < len(self._homes)]


def key_of(channel: Channel, mode: Mode = FULL) -> Key:
    """The list of a channel."""
    return Lists.key(*channel, mode)
