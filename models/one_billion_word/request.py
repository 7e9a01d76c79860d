"""Settings of a language model's run, as plain values."""

from __future__ import annotations

import dataclasses

from pipemesh.plan import Plan
from pipemesh.training.run import Options

from .sizes import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(Options):
    """Settings of a language model's run.

    Attributes:
        model: name of the configuration.
        settings: its settings, changed by the flags.
        device_type: `CPU` or `GPU`; None for GPUs if there are enough.
        other_text: whether to resume from a checkpoint with another text.
    """

    model: str
    settings: Settings
    device_type: str | None
    other_text: bool = False

    @property
    def plan(self) -> Plan:
        """Returns the plan, as far as it is chosen."""
        return self.settings.PLAN
