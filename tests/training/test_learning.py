"""Learning rates by step, beside those of `transformers`, and values that do not fit together."""

import importlib.util
import math

import pytest
import tensorflow as tf
from lingvo.core import learner, optimizer, schedule

from pipemesh.errors import TrainingError
from pipemesh.layers.optimizers import AdamW, Muon
from pipemesh.training.learning import OPTIMIZERS, Learning, set_attributes

STEPS = (0, 1, 2, 3, 5, 8, 9, 10, 11, 15, 19, 20, 21, 40)


def rates(**values):
    """The factors of some steps."""
    p = learner.Learner.Params().Set(name="loss")
    Learning(**values).change(p)
    made = p.lr_schedule.Instantiate()
    return [float(made.Value(tf.constant(step, tf.int64))) for step in STEPS]


def warm(step, steps):
    return min(1.0, step / steps) if steps else 1.0


def wsd(step, warmup, stable, end, last=0.0):
    begin = warmup + stable
    fall = min(1.0, max(0.0, (step - begin) / (end - begin)))
    return min(warm(step, warmup), 1 - fall * (1 - last))


CASES = [
    ({"learning_rate_schedule": "constant"}, lambda step: 1.0),
    ({"learning_rate_schedule": "constant", "warmup_steps": 4}, lambda step: warm(step, 4)),
    (
        {"learning_rate_schedule": "linear", "warmup_steps": 3, "decay_steps": 20},
        lambda step: wsd(step, 3, 0, 20),
    ),
    (
        {"learning_rate_schedule": "linear", "decay_steps": 20, "final_learning_rate": 0.1},
        lambda step: wsd(step, 0, 0, 20, 0.1),
    ),
    (
        {"learning_rate_schedule": "cosine", "warmup_steps": 5, "decay_steps": 20},
        lambda step: min(
            warm(step, 5), 0.5 + 0.5 * math.cos(math.pi * min(1, max(0, (step - 5) / 15)))
        ),
    ),
    (
        {"learning_rate_schedule": "cosine", "decay_steps": 20, "final_learning_rate": 1.0},
        lambda step: 1.0,
    ),
    (
        {"learning_rate_schedule": "inverse_sqrt", "warmup_steps": 4},
        lambda step: min(max(step, 1) / 4, math.sqrt(4 / max(step, 1))),
    ),
    (
        {"learning_rate_schedule": "wsd", "warmup_steps": 2, "decay_steps": 20, "stable_steps": 8},
        lambda step: wsd(step, 2, 8, 20),
    ),
    (
        {"learning_rate_schedule": "wsd", "warmup_steps": 2, "decay_steps": 20},
        lambda step: wsd(step, 2, 16, 20),
    ),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_rates_are_those_of_the_formulas(number, eagerly):
    values, wanted = CASES[number]
    assert rates(**values) == pytest.approx([wanted(step) for step in STEPS], abs=1e-6)


def test_rates_are_those_of_transformers(eagerly):
    """But for the first step of `inverse_sqrt`, which lingvo gives a rate, and after the end of
    `cosine`, where theirs rises again.
    """
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install -e '.[dev,peers]'")
    from transformers import optimization as theirs

    makers = {
        "constant": (theirs._get_constant_schedule_with_warmup_lr_lambda, {}),
        "linear": (theirs._get_linear_schedule_with_warmup_lr_lambda, {"num_training_steps": 20}),
        "cosine": (
            theirs._get_cosine_schedule_with_warmup_lr_lambda,
            {"num_training_steps": 20, "num_cycles": 0.5},
        ),
        "inverse_sqrt": (theirs._get_inverse_sqrt_schedule_lr_lambda, {"timescale": 4}),
    }
    for name, (factor, more) in makers.items():
        end = {"decay_steps": 20} if "num_training_steps" in more else {}
        found = rates(learning_rate_schedule=name, warmup_steps=4, **end)
        compared = slice(1, STEPS.index(20) + 1 if end else None)
        wanted = [factor(step, num_warmup_steps=4, **more) for step in STEPS[compared]]
        assert found[compared] == pytest.approx(wanted, abs=1e-6), name


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (
            {"optimizer": "sgd", "weight_decay": 0.1},
            "--weight_decay=0.1: sgd has none; give --optimizer=adamw|muon",
        ),
        ({"optimizer": "adam", "weight_decay_except": "b"}, "--weight_decay_except=b: adam has"),
        (
            {"learning_rate_schedule": "linear", "stable_steps": 3},
            "--stable_steps=3: linear has none; give --learning_rate_schedule=wsd",
        ),
        (
            {"decay_steps": 3},
            "--decay_steps=3: the model's own schedule has none; give --learning_rate_schedule=lin",
        ),
        (
            {"learning_rate_schedule": "constant", "final_learning_rate": 0.5},
            "--final_learning_rate=0.5: constant has none",
        ),
        ({"optimizer": "adamv"}, "--optimizer=adamv: it must be one of adam|adamw|"),
        ({"learning_rate_schedule": "cos"}, "--learning_rate_schedule=cos: it must be one of con"),
        (
            {"learning_rate_schedule": "linear", "final_learning_rate": 1.5},
            "--final_learning_rate=1.5: it is a share of the highest; give at most 1",
        ),
        (
            {"learning_rate_schedule": "cosine", "warmup_steps": 9, "decay_steps": 9},
            "--decay_steps=9: the fall would begin at step 9, after --warmup_steps=9; give more th",
        ),
        (
            {"learning_rate_schedule": "wsd", "stable_steps": 9, "decay_steps": 5},
            "the fall would begin at step 9, after --stable_steps=9; give more than that (default",
        ),
    ],
)
def test_values_that_do_not_fit_together_are_errors(values, told):
    with pytest.raises(TrainingError) as caught:
        Learning(**values)
    assert told in str(caught.value)


def test_what_only_the_params_show_is_an_error():
    p = learner.Learner.Params().Set(name="loss", optimizer=optimizer.Adam.Params())
    with pytest.raises(TrainingError, match="the model's Adam has none; give --optimizer=adamw"):
        Learning(weight_decay=0.1).change(p)
    with pytest.raises(TrainingError, match="linear ends at --decay_steps; give it"):
        Learning(learning_rate_schedule="linear").change(p)
    with pytest.raises(TrainingError, match="begins to fall after --warmup_steps"):
        Learning(learning_rate_schedule="inverse_sqrt").change(p)
    with pytest.raises(TrainingError, match="--warmup_steps=5: the model's ContinuousSchedule has"):
        Learning(warmup_steps=5).change(p)


def test_no_step_has_the_rate_zero_at_the_end():
    fall = {"learning_rate_schedule": "cosine", "decay_steps": 6}
    Learning(**fall).check_steps(6)
    Learning(**fall, final_learning_rate=0.1).check_steps(8)
    with pytest.raises(TrainingError, match="--decay_steps=6: the learning rate is 0 from that st"):
        Learning(**fall).check_steps(7)


class Tuned:
    OPTIMIZER, WEIGHT_DECAY, LEARNING_RATE = "adamw", 0.3, 0.1
    LEARNING_RATE_SCHEDULE, WARMUP_STEPS, DECAY_STEPS, STABLE_STEPS = "wsd", 5, 40, 20


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"optimizer": "muon"}, {"optimizer": "muon", "weight_decay": 0.3}),
        ({"optimizer": "sgd"}, {"optimizer": "sgd"}),
        (
            {"decay_steps": 50},
            {
                **{"learning_rate_schedule": "wsd", "warmup_steps": 5},
                **{"decay_steps": 50, "stable_steps": 20},
            },
        ),
        (
            {"learning_rate_schedule": "cosine"},
            {"learning_rate_schedule": "cosine", "warmup_steps": 5, "decay_steps": 40},
        ),
        (
            {"learning_rate_schedule": "constant"},
            {"learning_rate_schedule": "constant", "warmup_steps": 5},
        ),
    ],
)
def test_given_values_go_over_those_of_the_class(given, wanted):
    config = Tuned()
    set_attributes(config, given)
    assert Learning.of(config, given) == Learning(**wanted)


def test_warmup_steps_are_those_of_the_models_schedule():
    p = learner.Learner.Params().Set(lr_schedule=schedule.TransformerSchedule.Params())
    Learning(warmup_steps=7).change(p)
    assert p.lr_schedule.warmup_steps == 7


def test_only_given_values_change_params():
    p = learner.Learner.Params().Set(name="loss", learning_rate=0.5)
    before = p.ToText()
    Learning().change(p)
    assert p.ToText() == before
    Learning(optimizer="muon", weight_decay=0.3, clip_gradient_norm=0.0).change(p)
    assert p.optimizer.cls is Muon and p.optimizer.weight_decay == 0.3
    assert (p.learning_rate, p.clip_gradient_norm_to_value) == (0.5, 0.0)
    p.optimizer = AdamW.Params()
    Learning(weight_decay_except="norm").change(p)
    assert p.optimizer.weight_decay_except == "norm"


def test_every_optimizer_has_params():
    for name in OPTIMIZERS:
        p = learner.Learner.Params().Set(name="loss")
        Learning(optimizer=name).change(p)
        assert name in p.optimizer.cls.__name__.lower()
