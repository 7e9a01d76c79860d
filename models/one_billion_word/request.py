"""What a training of the language model is asked for, as plain values."""

from __future__ import annotations

import dataclasses

from pipemesh.plan import Plan
from pipemesh.training.run.options import Options

from .sizes import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(Options):
    """What a training of the language model is asked for.

    Attributes:
        model: name of the configuration.
        settings: its settings, with all that is asked for otherwise.
        device_type: `CPU` or `GPU`; None for GPUs where there are enough of them.
        other_text: whether to go on from a checkpoint with other text than it was trained on.
    """

    model: str
    settings: Settings
    device_type: str | None
    other_text: bool = False

    @property
    def plan(self) -> Plan:
        """How it is run, as far as it is chosen."""
        return self.settings.PLAN
