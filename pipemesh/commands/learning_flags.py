"""Flags of the optimizer and of learning rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipemesh.commands.flags import FLAGS, MODEL, Flag, FlagError, check_number, grouped
from pipemesh.errors import TrainingError
from pipemesh.training.learning import FALLING, OPTIMIZERS, SCHEDULES, Learning, not_taken

LEARNING_FLAGS = grouped(
    MODEL,
    Flag(
        "optimizer",
        choices=OPTIMIZERS,
        help="Optimizer; each needs a --learning_rate of its own. Default: the model's.",
    ),
    Flag(
        "learning_rate",
        float,
        help="The highest learning rate; a factor, if the model's own schedule says so. Default: "
        "the model's.",
    ),
    Flag(
        "learning_rate_schedule",
        choices=SCHEDULES,
        help="Course of the learning rate after --warmup_steps: it stays, falls by a line or half "
        "a cosine, falls as 1 / sqrt(step), or stays for --stable_steps before it falls by a line "
        "(wsd). Default: the model's.",
    ),
    Flag(
        "warmup_steps",
        int,
        least=0,
        help="Steps in which the learning rate grows from 0; default: the model's, or 0.",
    ),
    Flag(
        "decay_steps",
        int,
        help="Step at which the learning rate has fallen; default: the model's, or --steps of the "
        "first run.",
    ),
    Flag(
        "stable_steps",
        int,
        least=0,
        help="Steps of wsd between growth and fall; default: the model's, or so many that it falls "
        "in the last tenth of --decay_steps.",
    ),
    Flag(
        "final_learning_rate",
        float,
        least=0,
        help="Last learning rate, as a share of the highest, at most 1; default: the model's, "
        "or 0.",
    ),
    Flag(
        "weight_decay",
        float,
        least=0,
        help="Decay of adamw and muon, as a multiple of the learning rate; default: the model's, "
        "or 0.01 and 0.1.",
    ),
    Flag(
        "weight_decay_except",
        value="PATTERN",
        help="Regular expression of names of weights that do not decay, such as 'bias|norm'; '' "
        "for none. Default: the model's, or norms, biases and embeddings.",
    ),
    Flag(
        "clip_gradient_norm",
        float,
        least=0,
        help="Largest norm of all gradients together; 0 for any. Default: the model's.",
    ),
)


def given() -> dict[str, Any]:
    """Returns the values of the flags that are given; raises FlagError for invalid ones."""
    values: dict[str, Any] = {}
    for flag in LEARNING_FLAGS:
        value = FLAGS.value(flag.name)
        if value is not None:
            if not (isinstance(value, str) or (value == 0 and flag.least == 0)):
                check_number(flag.name, value)
            values[flag.name] = value
    # Without a schedule, its values may be for that of the model's class.
    is_open = "learning_rate_schedule" not in values
    of_class = not_taken({"learning_rate_schedule": None}) if is_open else set[str]()
    checked(lambda: Learning(**{n: v for n, v in values.items() if n not in of_class}))
    return values


def with_end(model: Any, steps: int) -> dict[str, Any]:
    """Returns the values of the flags that are given, and where a learning rate falls its end.

    That is `steps`, unless a flag or the model's class says it. For a resumed run it counts as
    given.
    """
    values = given()
    schedule = values.get("learning_rate_schedule", getattr(model, "LEARNING_RATE_SCHEDULE", None))
    if schedule in FALLING and "decay_steps" not in values:
        end = getattr(model, "DECAY_STEPS", None)
        if end is None:
            FLAGS.set("decay_steps", steps)
        values["decay_steps"] = steps if end is None else end
    return values


def checked(make: Callable[[], Learning]) -> Learning:
    """Makes a value; raises FlagError if its parts do not fit together."""
    try:
        return make()
    except TrainingError as error:
        raise FlagError(str(error)) from error
