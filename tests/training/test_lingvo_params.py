"""Params of lingvo are honoured, or refused before the first step; peaks of learning rates."""

import inspect
import pathlib
import re
import typing

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import (
    base_input_generator,
    base_layer,
    base_model,
    datasource,
    distillation_task,
    learner,
    optimizer,
    py_utils,
    schedule,
)

from pipemesh import training
from pipemesh.errors import DataError, TrainingError
from pipemesh.training import Options, Trainer
from pipemesh.training.evaluation import Predictor, evaluate
from pipemesh.training.lingvo_params import (
    RULES,
    Ramp,
    check_params,
    has_state,
    peak_rate,
    ramped,
)
from pipemesh.training.registered import RegisteredModel
from pipemesh.training.subject import SOURCE
from tests.commands.program import done
from tests.training import lingvo_sweep, small_models


def rows_of_readme():
    """Treatments of params by their names."""
    readme = pathlib.Path(training.__file__).with_name("README.md").read_text()
    rows = re.findall(r"^\| ((?:`[a-z]+\.\w+`(?:, )?)+) \| (.*) \|$", readme, re.MULTILINE)
    return {tuple(re.findall(r"[\w.]+", names)): treatment for names, treatment in rows}


def names_of_lingvo():
    """Names of the params of lingvo's tasks, learners, inputs and sources."""
    of_layers = set(dict(base_layer.BaseLayer.Params().IterParams()))
    base, own = base_model.BaseTask.Params(), learner.Learner.Params()
    kinds = [
        kind
        for kind in vars(datasource).values()
        if inspect.isclass(kind) and issubclass(kind, datasource.DataSource)
    ]
    inputs = ["BaseSequenceInputGenerator", "BaseInputGeneratorFromFiles"]
    holders = [
        *[("task", base), ("train", base.train), ("learner", own), ("eval", base.eval)],
        *(("input", getattr(base_input_generator, name).Params()) for name in inputs),
        *(("source", kind.Params()) for kind in kinds),
    ]
    of_learner = set(dict(own.IterParams()))
    return {
        f"{owner}.{name}"
        for owner, params in holders
        for name, _ in params.IterParams()
        if name not in of_layers and not (owner == "train" and name in of_learner)
    }


def test_the_readme_lists_all_params_of_lingvo_once():
    rows = rows_of_readme()
    names = [name for row in rows for name in row]
    assert len(names) == len(set(names))
    assert set(names) == names_of_lingvo()
    for params, _, _ in RULES:
        treatment = rows[tuple(params.split())]
        assert "refused" in treatment, (params, treatment)


REFUSED = {
    "task.task_global_step": lambda p: p.Set(task_global_step=True),
    "task.defer_global_step_update": lambda p: p.Set(defer_global_step_update=True),
    "train.early_stop": lambda p: p.train.early_stop.Set(window=5),
    "train.vn_std train.vn_start_step": lambda p: p.Set(
        vn=py_utils.VariationalNoiseParams(None, False, True)
    ).train.Set(vn_std=0.1),
    "train.init_from_checkpoint_rules train.init_from_checkpoint_override": lambda p: p.train.Set(
        init_from_checkpoint_override="/some/ckpt"
    ),
    "train.pruning_hparams_dict": lambda p: p.train.Set(pruning_hparams_dict={"a": 1}),
    "train.enqueue_max_steps": lambda p: p.train.Set(enqueue_max_steps=3),
    "train.learner": lambda p: p.train.Set(learner=[]),
    "learner.scale_gradients": lambda p: p.train.learner.Set(scale_gradients=False),
    "learner.optimizer": lambda p: p.train.learner.Set(optimizer=optimizer.Accumulator.Params()),
    "learner.lr_schedule": lambda p: p.train.learner.Set(
        lr_schedule=schedule.CombinedMinimumSchedule.Params().Set(
            schedules=[schedule.Constant.Params(), schedule.DevBasedSchedule.Params()]
        )
    ),
}


# Short values are shown.
SHOWN = [
    "p.train.init_from_checkpoint_override='/some/ckpt': it is for lingvo's trainer",
    "of its learner optimizer=Accumulator: it keeps its state",
    "of its learner scale_gradients=False: gradients",
]


def test_unsupported_params_are_refused_by_name():
    assert set(REFUSED) == {names for names, _, _ in RULES}
    check_params(small_models.PlainPoints().Task())
    errors = []
    for names, _, advice in RULES:
        task = small_models.PlainPoints().Task()
        REFUSED[names](task)
        with pytest.raises(TrainingError) as caught:
            check_params(task)
        told = str(caught.value)
        errors.append(told)
        assert advice in told and "\n" not in told
        assert any(n.partition(".")[2] in told for n in names.split()), (names, told)
    for shown in SHOWN:
        assert any(shown in told for told in errors), shown


class Points(datasource.DataSource):
    """The same batch again and again."""

    def GetNext(self):
        x = tf.reshape(tf.range(32.0), [8, 4]) / 32
        return py_utils.NestedMap(x=x, y=tf.ones([8, 1]))


class Mixed(base_input_generator.BaseInputGeneratorFromFiles):
    """Batches from two sources, as lingvo mixes them."""

    def _InputBatch(self):
        return self._BuildDataSource()


class MixedPoints(small_models.PlainPoints):
    """The second source trains the bias alone."""

    SOURCES = datasource.CrossBatchMixingDataSource.Params().Set(
        sub=[Points.Params().Set(name=name) for name in "ab"],
        weights=[0.5, 0.5],
        bprop_variable_filters=["", "dense/b"],
        random_seed=5,
    )

    def Train(self):
        return Mixed.Params().Set(name="mixed", file_datasource=self.SOURCES)

    def Task(self):
        p = super().Task()
        p.train.learner.optimizer = optimizer.SGD.Params()
        return p


def trainer(config, logdir):
    return Trainer(RegisteredModel(config, "Points"), Options(logdir=str(logdir), steps=9))


def test_each_source_trains_the_weights_of_its_filter(eagerly, tmp_path):
    made = trainer(MixedPoints(), tmp_path)
    sources = set()
    for _ in range(8):
        before = {v.name: v.numpy() for v in made.trained.task.vars.Flatten() if v.trainable}
        made.train_step()
        moved = {
            v.name.split("/")[2]
            for v in made.trained.task.vars.Flatten()
            if v.trainable and not np.array_equal(v.numpy(), before[v.name])
        }
        source = int(np.argmax(made.batch[SOURCE]))
        sources.add(source)
        assert moved == ({"w", "b", "beta", "gamma"}, {"b"})[source]
    assert sources == {0, 1}


def test_a_curriculum_of_data_is_refused(eagerly, tmp_path):
    class Curriculum(MixedPoints):
        SOURCES = datasource.CurriculumDataSource.Params().Set(
            sub=[Points.Params().Set(name=name) for name in "ab"], boundaries=[4]
        )

    with pytest.raises(DataError, match="goes by the global step, as a CurriculumDataSource"):
        trainer(Curriculum(), tmp_path)


class Towers(base_model.BaseTask):
    """As lingvo's LeNet: it overrides FPropTower, and looks at its input."""

    SEEN: typing.ClassVar[list] = []

    def __init__(self, params):
        super().__init__(params)
        self.SEEN.append((params.input.source.seed, self.input.params.source.seed))
        self.CreateChild("dense", small_models.Hidden.Params().Set(dims=(4, 1)))

    def FPropTower(self, theta, input_batch):
        y = input_batch.y
        x, _ = self.dense.FProp(theta.dense, input_batch.x, y)
        rows = tf.constant(float(small_models.BATCH))
        return {"loss": (tf.reduce_mean(tf.square(x - y)), rows)}, {}


def test_a_task_is_given_its_input_as_lingvo_does(eagerly, tmp_path):
    class Model(small_models.PlainPoints):
        def Task(self):
            return small_models.trained(Towers.Params().Set(name="points"))

    Towers.SEEN.clear()
    made = trainer(Model(), tmp_path)
    made.train_step()
    path = made.save()
    subject = RegisteredModel(Model(), "Points")
    assert evaluate(subject, path)[0] == 1
    assert Towers.SEEN == [(1, 1), (2, 2)], "that of Train, then that of Test"
    with pytest.raises(TrainingError, match="task Towers has no ComputePredictions of its own"):
        Predictor(subject, path)


def test_methods_that_would_change_the_task_are_refused():
    for name in ("Model", "Task_Test"):
        kind = type("Other", (small_models.PlainPoints,), {name: lambda self: None})
        with pytest.raises(TrainingError, match=rf"its {name}\(\) is not called"):
            RegisteredModel(kind(), "Points")


def test_a_distillation_trains_the_student_alone(eagerly, tmp_path):
    case = lingvo_sweep.CASES["distillation_task.DistillationTask"]
    made = trainer(lingvo_sweep.model_of(distillation_task.DistillationTask, case), tmp_path)
    names = {v.name: v.numpy() for v in made.trained.task.vars.Flatten()}
    made.train_step()
    moved = {v.name for v in made.trained.task.vars.Flatten() if v.numpy() != names[v.name]}
    assert moved == {"task/student/b/var:0", "task/student/m/var:0"}


def test_a_backward_pass_of_its_own_is_refused():
    class Own(small_models.Classifier):
        def BProp(self):
            pass

    with pytest.raises(TrainingError, match=r"Own\.BProp is not called here, but FPropTower and"):
        check_params(small_models.trained(Own.Params().Set(name="points")))


@pytest.mark.slow
def test_a_model_says_itself_how_long_it_is_trained(tmp_path):
    flags = ["train", "--model=tests.training.small_models.LimitedPoints", f"--logdir={tmp_path}"]
    out = done(*flags, "--steps=4")
    assert "--steps=4 in place of p.train.max_steps=3" in out
    assert f"checkpoint: {tmp_path}/ckpt-4" in out


def task(own, of_learner=True):
    params = base_model.BaseTask.Params().Set(name="task")
    rates = learner.Learner.Params().Set(name="loss") if of_learner else params.train
    rates.Set(learning_rate=0.5, lr_schedule=own)
    if of_learner:
        params.train.learner = rates
    return params


@pytest.mark.parametrize("of_learner", [True, False])
def test_the_peak_is_that_within_the_steps(eagerly, of_learner):
    own = schedule.PolynomialSchedule.Params().Set(start=(0, 0.0), limit=(100, 1.0))
    params = task(own, of_learner)
    name = "p.train.learner.learning_rate" if of_learner else "p.train.learning_rate"
    for steps, peak in [(51, 0.25), (101, 0.5), (10_000, 0.5), (0, 0.0)]:
        assert peak_rate(params, steps) == (name, 0.5, pytest.approx(peak))
    # A ramp takes the schedule's place in a copy.
    copy = ramped(params, 30)
    assert peak_rate(params, 101)[2] == pytest.approx(0.5)
    assert peak_rate(copy, 30)[1:] == (1.0, pytest.approx(10.0, rel=1e-5))
    assert (copy.train.learner or copy.train).lr_schedule.cls is Ramp
    params.train.learner = []
    assert ramped(params, 30).train.learner == []


def test_the_peak_of_a_short_warm_up_is_found(eagerly):
    for warmup, steps in [(100, 100_000), (1000, 1_000_000), (7, 300)]:
        own = schedule.TransformerSchedule.Params().Set(warmup_steps=warmup, model_dim=512)
        peak = 0.5 * (512 * warmup) ** -0.5
        assert peak_rate(task(own), steps)[2] == pytest.approx(peak, rel=0.05)


def test_a_schedule_that_does_not_say_has_no_peak(eagerly):
    assert peak_rate(task(small_models.Remembering.Params()), 10) is None
    assert has_state(task(small_models.Remembering.Params()))
    few = small_models.ByStep.Params().Set(values=[1.0, 3.0, 2.0])
    # All there are, and no other.
    assert peak_rate(task(few), 3)[2] == 1.5
    assert peak_rate(task(few), 4) is None and not has_state(task(few))
