"""The optimizer, the learning rates and the clipping of a run, as flags name them.

This module needs TensorFlow only where it changes params.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pipemesh.errors import TrainingError

OPTIMIZERS = ("adam", "adamw", "muon", "adafactor", "sgd", "momentum")
# Those with weight decay.
_DECAYING = ("adamw", "muon")
SCHEDULES = ("constant", "linear", "cosine", "inverse_sqrt", "wsd")
# Those that end at `decay_steps`.
FALLING = ("linear", "cosine", "wsd")
# Share of the steps in which `wsd` falls by default (Hu et al., "MiniCPM", 2024, section 4.2).
_FALL = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learning:
    """The optimizer, the learning rates and the clipping of a run; None leaves the model's own.

    The learning rate of a step is `learning_rate` times a factor. The factor grows linearly from 0
    to 1 in `warmup_steps`. Then it stays (`constant`); falls to `final_learning_rate` at
    `decay_steps` by a line (`linear`) or half a cosine (`cosine`), or by a line after
    `stable_steps` (`wsd`); or falls as 1 / sqrt(step) (`inverse_sqrt`). A step counts from 0.

    Attributes:
        optimizer: one of `OPTIMIZERS`.
        learning_rate: the highest learning rate.
        learning_rate_schedule: one of `SCHEDULES`.
        warmup_steps: steps of growth; default: 0.
        decay_steps: the step from which on the rate stays at its end.
        stable_steps: steps between growth and fall of `wsd`; default: the fall takes a tenth of
            `decay_steps`.
        final_learning_rate: the last factor; default: 0.
        weight_decay: decay of `adamw` and `muon`.
        weight_decay_except: regular expression of names of weights that do not decay.
        clip_gradient_norm: the largest norm of all gradients; 0 for any.

    Raises:
        TrainingError: values do not fit together.

    Example:
        >>> Learning(optimizer="sgd", weight_decay=0.1)
        Traceback (most recent call last):
        pipemesh.errors.TrainingError: --weight_decay=0.1: sgd has none; give --optimizer=adamw|muon
    """

    optimizer: str | None = None
    learning_rate: float | None = None
    learning_rate_schedule: str | None = None
    warmup_steps: int | None = None
    decay_steps: int | None = None
    stable_steps: int | None = None
    final_learning_rate: float | None = None
    weight_decay: float | None = None
    weight_decay_except: str | None = None
    clip_gradient_norm: float | None = None

    def __post_init__(self) -> None:
        for name in ("weight_decay", "weight_decay_except"):
            if getattr(self, name) is not None and self.optimizer not in (None, *_DECAYING):
                self._refuse(name, f"{self.optimizer} has none; give --optimizer=adamw|muon")
        schedule = self.learning_rate_schedule
        for name, schedules in (
            ("stable_steps", ("wsd",)),
            ("decay_steps", FALLING),
            ("final_learning_rate", FALLING),
        ):
            if getattr(self, name) is not None and schedule not in schedules:
                wanted = "|".join(schedules)
                own = f"{schedule} has none" if schedule else "the model's own schedule has none"
                self._refuse(name, f"{own}; give --learning_rate_schedule={wanted}")
        if schedule == "inverse_sqrt" and not self.warmup_steps:
            self._refuse(
                "learning_rate_schedule", "it begins to fall after --warmup_steps; give it"
            )
        if self.decay_steps is not None and self.fall_begins() >= self.decay_steps:
            self._refuse(
                "decay_steps",
                f"the fall would begin at step {self.fall_begins()}; give more, or fewer "
                "--warmup_steps or --stable_steps",
            )

    def _refuse(self, name: str, why: str) -> None:
        raise TrainingError(f"--{name}={getattr(self, name)}: {why}")

    @classmethod
    def of(cls, config: Any) -> Learning:
        """Returns the attributes of a model's class, such as `LEARNING_RATE`, where it has them."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: getattr(config, name.upper(), None) for name in names})

    def fall_begins(self) -> int:
        """Returns the first step of the fall."""
        warmup, stable = self.warmup_steps or 0, 0
        if self.learning_rate_schedule == "wsd":
            steps = self.decay_steps or 0
            stable = self.stable_steps
            if stable is None:
                stable = max(0, steps - round(_FALL * steps) - warmup)
        return warmup + stable

    def change(self, params: Any) -> None:
        """Changes the params of a lingvo learner, or of `p.train` where they are in it.

        Raises:
            TrainingError: the model's optimizer has no weight decay.
        """
        if self.optimizer is not None:
            params.optimizer = optimizer_params(self.optimizer)
        if self.learning_rate is not None:
            params.learning_rate = self.learning_rate
        if self.learning_rate_schedule is not None:
            params.lr_schedule = self._schedule()
        if self.clip_gradient_norm is not None:
            params.clip_gradient_norm_to_value = self.clip_gradient_norm
        for name in ("weight_decay", "weight_decay_except"):
            value = getattr(self, name)
            if value is None:
                continue
            if name not in params.optimizer:
                own = params.optimizer.cls.__name__
                self._refuse(name, f"the model's {own} has none; give --optimizer=adamw|muon")
            params.optimizer.Set(**{name: value})

    def _schedule(self) -> Any:
        """Returns params of lingvo's schedule."""
        from lingvo.core import schedule

        from pipemesh.training.lingvo_params import CosineFall

        warmup, final = self.warmup_steps or 0, self.final_learning_rate or 0.0
        if self.learning_rate_schedule == "inverse_sqrt":
            return schedule.LinearRampupSqrtDecay.Params().Set(warmup_steps=warmup)
        parts = []
        if warmup:
            parts.append(schedule.LinearSchedule.Params().Set(start=(0, 0.0), limit=(warmup, 1.0)))
        if self.learning_rate_schedule in FALLING:
            if self.decay_steps is None:
                name = self.learning_rate_schedule
                self._refuse("learning_rate_schedule", f"{name} ends at --decay_steps; give it")
            is_cosine = self.learning_rate_schedule == "cosine"
            fall = (CosineFall if is_cosine else schedule.LinearSchedule).Params()
            ends = {"start": (self.fall_begins(), 1.0), "limit": (self.decay_steps, final)}
            parts.append(fall.Set(**ends))
        if not parts:
            return schedule.Constant.Params()
        return schedule.CombinedMinimumSchedule.Params().Set(schedules=parts)


def optimizer_params(name: str) -> Any:
    """Returns the params of an optimizer; all support weights that a layout splits."""
    from lingvo.core import optimizer

    from pipemesh.layers.optimizers import Adafactor, AdamW, Muon

    return {
        "adam": optimizer.Adam.ParamsB(),
        "adamw": AdamW.Params(),
        "muon": Muon.Params(),
        # Its authors recommend this for steps relative to the size of a weight.
        "adafactor": Adafactor.Params().Set(decay_exponent_pow=0.8, clipping_threshold=1.0),
        "sgd": optimizer.SGD.Params(),
        "momentum": optimizer.Momentum.Params(),
    }[name]
