"""The optimizer, the learning rates and the clipping of a run, as flags name them.

This module needs TensorFlow only where it changes params.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from pipemesh.errors import TrainingError

OPTIMIZERS = ("adam", "adamw", "muon", "adafactor", "sgd", "momentum")
# Those with weight decay.
_DECAYING = ("adamw", "muon")
SCHEDULES = ("constant", "linear", "cosine", "inverse_sqrt", "wsd")
# Those that end at `decay_steps`.
FALLING = ("linear", "cosine", "wsd")
# Values that not all optimizers or schedules take: which one decides, and those that do.
_TAKERS = {
    "weight_decay": ("optimizer", _DECAYING),
    "weight_decay_except": ("optimizer", _DECAYING),
    "stable_steps": ("learning_rate_schedule", ("wsd",)),
    "decay_steps": ("learning_rate_schedule", FALLING),
    "final_learning_rate": ("learning_rate_schedule", FALLING),
}
# Values that are set together.
_TOGETHER = (
    ("optimizer", "weight_decay", "weight_decay_except"),
    ("learning_rate",),
    (
        *("learning_rate_schedule", "warmup_steps"),
        *("decay_steps", "stable_steps", "final_learning_rate"),
    ),
    ("clip_gradient_norm",),
)
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
        warmup_steps: steps of growth; default: 0. Without `learning_rate_schedule` those of the
            model's own, if it has a warm-up.
        decay_steps: the step from which on the rate stays at its end.
        stable_steps: steps between growth and fall of `wsd`; default: the fall takes a tenth of
            `decay_steps`.
        final_learning_rate: the last factor, at most 1; default: 0.
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
        for by, known in (("optimizer", OPTIMIZERS), ("learning_rate_schedule", SCHEDULES)):
            if getattr(self, by) not in (None, *known):
                self._refuse(by, f"it must be one of {'|'.join(known)}")
        for name, (by, takers) in _TAKERS.items():
            chosen = getattr(self, by)
            # The model's own optimizer may take it.
            is_open = chosen is None and by == "optimizer"
            if getattr(self, name) is not None and chosen not in takers and not is_open:
                own = chosen or "the model's own schedule"
                self._refuse(name, f"{own} has none; give --{by}={'|'.join(takers)}")
        if self.final_learning_rate is not None and self.final_learning_rate > 1:
            self._refuse("final_learning_rate", "it is a share of the highest; give at most 1")
        if self.decay_steps is not None and self.fall_begins() >= self.decay_steps:
            before = ("warmup_steps", "stable_steps")
            those = [f"--{n}={value}" for n in before if (value := getattr(self, n)) is not None]
            self._refuse(
                "decay_steps",
                f"the fall would begin at step {self.fall_begins()}, after "
                f"{' and '.join(those)}; give more than that (default: --steps), or fewer of these",
            )

    def _refuse(self, name: str, why: str) -> None:
        raise TrainingError(f"--{name}={getattr(self, name)}: {why}")

    @classmethod
    def of(cls, config: Any, names: Collection[str] | None = None) -> Learning:
        """Returns the attributes of a model's class, such as `LEARNING_RATE`, where it has them; of
        these by default all, else those that are set together with `names`.
        """
        return cls(
            **{
                name: getattr(config, name.upper(), None)
                for together in _TOGETHER
                for name in together
                if names is None or not set(together).isdisjoint(names)
            }
        )

    def check_steps(self, steps: int) -> None:
        """Raises TrainingError if a run of so many steps has some with the learning rate 0 at its
        end.
        """
        end = self.decay_steps
        if end is not None and steps > end and not self.final_learning_rate:
            self._refuse(
                "decay_steps",
                f"the learning rate is 0 from that step on, up to --steps={steps}; give "
                f"--decay_steps={steps} to let it fall until the end, --final_learning_rate, or "
                f"--steps={end}",
            )

    def fall_begins(self) -> int:
        """Returns the first step of the fall."""
        warmup, stable = self.warmup_steps or 0, 0
        if self.learning_rate_schedule == "wsd":
            steps = self.decay_steps or 0
            stable = self.stable_steps
            if stable is None:
                stable = max(0, steps - max(1, round(_FALL * steps)) - warmup)
        return warmup + stable

    def change(self, params: Any) -> None:
        """Changes the params of a lingvo learner, or of `p.train` where they are in it.

        Raises:
            TrainingError: the model's optimizer has no weight decay, or its schedule no warm-up;
                or the schedule needs another value.
        """
        if self.optimizer is not None:
            params.optimizer = optimizer_params(self.optimizer)
        if self.learning_rate is not None:
            params.learning_rate = self.learning_rate
        if self.learning_rate_schedule is not None:
            params.lr_schedule = self._schedule()
        elif self.warmup_steps is not None:
            if "warmup_steps" not in params.lr_schedule:
                self._refuse(
                    "warmup_steps",
                    f"the model's {params.lr_schedule.cls.__name__} has none; give "
                    f"--learning_rate_schedule={'|'.join(SCHEDULES)}",
                )
            params.lr_schedule.warmup_steps = self.warmup_steps
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
        from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip
        from lingvo.core import schedule

        from pipemesh.training.lingvo_params import CosineFall

        warmup, final = self.warmup_steps or 0, self.final_learning_rate or 0.0
        if self.learning_rate_schedule == "inverse_sqrt":
            if not warmup:
                why = "it begins to fall after --warmup_steps; give it"
                self._refuse("learning_rate_schedule", why)
            return schedule.LinearRampupSqrtDecay.Params().Set(warmup_steps=warmup)
        parts = []
        if warmup:
            parts.append(schedule.LinearSchedule.Params().Set(start=(0, 0.0), limit=(warmup, 1.0)))
        if self.learning_rate_schedule in FALLING:
            if self.decay_steps is None:
                name = self.learning_rate_schedule
                why = f"{name} ends at --decay_steps; give it, or DECAY_STEPS of the model's class"
                self._refuse("learning_rate_schedule", why)
            is_cosine = self.learning_rate_schedule == "cosine"
            fall = (CosineFall if is_cosine else schedule.LinearSchedule).Params()
            ends = {"start": (self.fall_begins(), 1.0), "limit": (self.decay_steps, final)}
            parts.append(fall.Set(**ends))
        if not parts:
            return schedule.Constant.Params()
        return schedule.CombinedMinimumSchedule.Params().Set(schedules=parts)


def not_taken(given: Mapping[str, Any]) -> set[str]:
    """Returns the names of values that a given optimizer or schedule does not take."""
    return {n for n, (by, takers) in _TAKERS.items() if given.get(by, takers[0]) not in takers}


def set_attributes(config: Any, given: Mapping[str, Any]) -> None:
    """Sets attributes of a model's class to given values, and clears those that they replace."""
    for name, value in {**dict.fromkeys(not_taken(given) - {*given}), **given}.items():
        setattr(config, name.upper(), value)


def fall_later(config: Any) -> None:
    """Lets a falling schedule whose end a model's class does not say fall after any run, until the
    number of steps is known.
    """
    schedule = getattr(config, "LEARNING_RATE_SCHEDULE", None)
    if schedule in FALLING and getattr(config, "DECAY_STEPS", None) is None:
        config.DECAY_STEPS = 10**9


def optimizer_params(name: str) -> Any:
    """Returns the params of an optimizer; all support weights that a layout splits."""
    from pipemesh.layers import lingvo_loader as lingvo_loader  # isort: skip
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
