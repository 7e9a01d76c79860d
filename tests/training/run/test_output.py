"""Output of a run: text, record, page, histograms and profiles."""

import json
import os
import signal
import types

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.errors import DataError, TrainingError
from pipemesh.hosts import watch
from pipemesh.report import read
from pipemesh.training import Options, Trainer
from pipemesh.training.registered import RegisteredModel
from pipemesh.training.run.loop import Loop
from pipemesh.training.run.output import Histograms, Profile
from tests.models.one_billion_word.small_training import summaries
from tests.training import small_models


def trained(logdir, steps=4, name="PlainPoints", restore=None, stop=None, dataset=None, **changes):
    """The exit code of a training in this process."""
    logdir.mkdir(exist_ok=True)
    values = {"save_every": 2, "eval_every": 2, "eval_batches": 2} | changes
    options = Options(logdir=str(logdir), steps=steps, given={"seed": 3}, **values)
    subject = RegisteredModel(getattr(small_models, name)(), name, dataset=dataset)
    trainer = Trainer(subject, options, restore and str(restore), keeps_place=True)
    if stop:
        real = trainer.train_steps

        def train_steps(most):
            results = real(most)
            if trainer.step == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            return results

        trainer.train_steps = train_steps
    return Loop(trainer, options).run()


def events(logdir):
    return [json.loads(line) for line in (logdir / "record.jsonl").read_text().splitlines()]


def test_a_run_is_recorded_from_begin_to_end(eagerly, tmp_path, capsys):
    assert trained(tmp_path) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-2:] == [f"report: {tmp_path}/report.html", f"checkpoint: {tmp_path}/ckpt-4"]
    told = events(tmp_path)
    kinds = [event["event"] for event in told]
    assert (kinds[0], kinds[-1], kinds.count("step")) == ("begin", "end", 4)
    assert "forecast" not in kinds, "without a pipeline"
    assert told[0]["flags"] == {"seed": 3} and told[0]["name"] == "PlainPoints"
    run = read(str(tmp_path))
    assert run.state == "done, at step 4" and run.unread == 0
    assert [step for step, _ in run.heldout["loss"]] == [2]
    assert [step for step, _ in run.final["accuracy"]] == [4]
    assert list(run.told["checkpoint"]) == [2, 4]
    assert run.told["checkpoint"][4]["path"] == f"{tmp_path}/ckpt-4"
    assert run.fact("measured", "peak_memory") > 1e6
    for line in out:
        if line.startswith("step 2: held out loss "):
            loss = float(line.split()[5].rstrip(","))
            assert run.heldout["loss"] == [(2, pytest.approx(loss, abs=1e-3))]
            break
    else:
        raise AssertionError(out)
    assert "done, at step 4" in (tmp_path / "report.html").read_text()


def test_a_resumed_run_has_the_same_curves(eagerly, tmp_path, capsys):
    assert trained(tmp_path / "whole", 6) == 0
    assert trained(tmp_path / "run", 6, stop=3) == 128 + signal.SIGTERM
    stopped = read(str(tmp_path / "run"))
    assert stopped.state == "stopped by SIGTERM, at step 3"
    assert list(stopped.told["checkpoint"]) == [2, 3]
    assert "stopped by SIGTERM" in (tmp_path / "run" / "report.html").read_text()
    # From a checkpoint before: what is beyond it counts no more.
    assert trained(tmp_path / "run", 6, restore=tmp_path / "run" / "ckpt-2") == 0
    run, whole = read(str(tmp_path / "run")), read(str(tmp_path / "whole"))
    assert run.resumed == [2] and run.state == "done, at step 6"
    for name in ("loss", "accuracy", "learning_rate"):
        assert run.train[name] == whole.train[name]
    assert (run.heldout, run.final) == (whole.heldout, whole.final)


def test_steps_that_are_skipped_are_told_each(eagerly, tmp_path, capsys):
    assert trained(tmp_path, 6, "SpoiledPoints") == 0
    run = read(str(tmp_path))
    (step,) = run.told["skipped"]
    assert "not finite" in run.told["skipped"][step]["why"]
    assert [number for number, _ in run.train["loss"]] == sorted({*range(1, 7)} - {step})
    capsys.readouterr()
    with pytest.raises(TrainingError):
        trained(tmp_path / "stopped", 6, "SpoiledPoints", on_nonfinite="stop", log_format="json")
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["event"] == "end" and not last["is_done"] and "not finite" in last["reason"]


def test_a_training_ends_early_where_nothing_gets_better(eagerly, tmp_path, capsys):
    early = {"eval_every": 1, "save_every": 1000}
    assert trained(tmp_path / "early", 300, early_stop=3, **early) == 0
    assert "stopped early: 3 evaluations were no better than " in capsys.readouterr().out
    last = read(str(tmp_path / "early")).step
    assert 3 < last < 300 and (tmp_path / "early" / f"ckpt-{last}.index").exists()
    # Nothing judges.
    assert trained(tmp_path / "none", 9, early_stop=1, dataset="none", **early) == 0
    assert (tmp_path / "none" / "ckpt-9.index").exists()
    assert "held out" not in capsys.readouterr().out


def test_going_on_judges_the_step_that_was_the_last_one(eagerly, tmp_path, capsys):
    """Early stopping counts the same evaluations wherever a training was interrupted."""

    def judged(steps, restore=None):
        assert trained(tmp_path, steps, restore=restore) == 0
        out = capsys.readouterr().out.splitlines()
        return [line.partition(":")[0] for line in out if "held out" in line]

    assert judged(4) == ["step 2", "held out at step 4"]
    assert judged(8, tmp_path / "ckpt-4") == ["step 4", "step 6", "held out at step 8"]
    # A step is judged once.
    assert judged(8, tmp_path / "ckpt-6") == ["held out at step 8"]


def whole_record(logdir):
    """All events of a run but their times, and the tensors of its last checkpoint."""
    kept = [e for e in events(logdir) if e["event"] in OF_RESULTS]
    for event in kept:
        for name in [n for n in event if n in TIMES]:
            del event[name]
    path = tf.train.latest_checkpoint(str(logdir))
    names = [
        name for name, _ in tf.train.list_variables(path) if "/" in name and "data" not in name
    ]
    return kept, {name: tf.train.load_variable(path, name) for name in names}


OF_RESULTS = "step", "heldout", "final", "skipped", "spike"
TIMES = "time", "seconds", "examples_per_second"


def assert_same_tensors(found, wanted):
    assert found.keys() == wanted.keys() and len(wanted) > 4
    for variable, value in wanted.items():
        np.testing.assert_array_equal(found[variable], value, err_msg=variable)


def test_steps_of_a_call_are_those_of_several(eagerly, tmp_path, capsys):
    """One of them is not finite; evaluation, histograms and checkpoints cut calls."""
    runs = tmp_path / "one", tmp_path / "several"
    cuts = {"eval_every": 5, "save_every": 7, "histogram_every": 6}
    for run, steps in zip(runs, (1, 4), strict=True):
        assert trained(run, 11, "SpoiledPoints", steps_per_call=steps, **cuts) == 0
    one, several = map(whole_record, runs)
    assert one[0] == several[0] and len(one[0]) >= 12
    assert_same_tensors(several[1], one[1])
    assert histograms(runs[0]).keys() == histograms(runs[1]).keys()


def test_a_signal_is_answered_after_the_call_of_steps(eagerly, tmp_path, capsys):
    """Going on takes the next batch, with other numbers of steps a call."""
    whole, run, name = tmp_path / "whole", tmp_path / "run", "ShortStagedPoints"
    cuts = {"eval_every": 5, "save_every": 7}
    assert trained(whole, 10, name, **cuts) == 0
    assert trained(run, 10, name, stop=5, steps_per_call=3, **cuts) == 128 + signal.SIGTERM
    assert trained(run, 10, name, restore=run / "ckpt-5", steps_per_call=5, **cuts) == 0
    (wanted, tensors), (found, others) = map(whole_record, (whole, run))
    resumed = {event["step"]: event for event in found if event["event"] == "step"}
    assert [*resumed.values()] == [event for event in wanted if event["event"] == "step"]
    assert_same_tensors(others, tensors)


def test_batches_read_before_a_failure_are_trained_on(eagerly, tmp_path, monkeypatch):
    options = Options(logdir=str(tmp_path), steps=9, steps_per_call=4)
    trainer = Trainer(RegisteredModel(small_models.PlainPoints(), "Points"), options)
    batches = [trainer.batches.next() for _ in range(3)]
    rest = iter([*batches, DataError("gone")])

    def read():
        if isinstance(batch := next(rest), DataError):
            raise batch
        return batch

    trainer._next_batch = read
    assert len(trainer.train_steps(4)) == 3 == trainer.step
    with pytest.raises(DataError, match="gone"):
        trainer.train_steps(1)
    short = {name: value[:5] for name, value in batches[0].items()}
    rest = iter([batches[0], py_utils.NestedMap(short)])
    with pytest.raises(TrainingError, match=r"shapes \[\[8, 4\], .*use --steps_per_call=1"):
        trainer.train_steps(2)
    assert trainer.step == 3
    monkeypatch.setattr(watch, "_current", types.SimpleNamespace(stages={}))
    with pytest.raises(TrainingError, match="--steps_per_call=4: steps on workers are watched"):
        Trainer(RegisteredModel(small_models.PlainPoints(), "Points"), options)


def test_an_unwritable_record_or_page_ends_nothing(eagerly, tmp_path, capsys):
    (tmp_path / "record.jsonl").mkdir()
    assert trained(tmp_path) == 0
    err = capsys.readouterr().err
    assert err.count("record.jsonl cannot be written (Is a directory); training goes on") == 1
    assert err.count("the report cannot be written (") == 1
    (tmp_path / "record.jsonl").rmdir()
    (tmp_path / "report.html").mkdir()
    assert trained(tmp_path, 5, restore=tmp_path / "ckpt-4") == 0
    out, err = capsys.readouterr()
    assert err.count("the report cannot be written (") == 1 and "report: " not in out
    # Steps before are unknown.
    assert [step for step, _ in read(str(tmp_path)).train["loss"]] == [5]


KINDS = "weights", "gradients", "updates"


def histograms(logdir):
    """By tag and step: the buckets' sums, and the range."""
    found = {}
    for path in (logdir / "train").iterdir():
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "histograms":
                    found[value.tag, event.step] = tf.make_ndarray(value.tensor)
    return found


def test_histograms_come_every_so_many_steps(eagerly, tmp_path, capsys):
    assert trained(tmp_path, 5, histogram_every=2) == 0
    found = histograms(tmp_path)
    assert {step for _, step in found} == {2, 4}
    names = {tag.partition("/")[2] for tag, _ in found}
    assert "points/dense/w" in names and not any("moving" in name for name in names)
    assert {tag for tag, _ in found} == {f"{kind}/{name}" for kind in KINDS for name in names}
    # 4 inputs and 1 output; a step changes them by little.
    buckets = found["weights/points/dense/w", 4]
    assert buckets[:, 2].sum() == 4
    updates = found["updates/points/dense/w", 4]
    assert updates[:, 2].sum() == 4 and 0 < np.abs(updates[:, :2]).max() < 0.5
    gradients = found["gradients/points/dense/w", 4]
    assert gradients[:, 2].sum() == 4 and np.abs(gradients[:, :2]).max() > 0


def test_a_weight_in_slices_is_one():
    parts = [tf.Variable([[1.0, 2.0]]), tf.Variable([[3.0]])]
    seen = Histograms({"w": parts}, every=1)
    seen.before(7)
    parts[1].assign_add([[1.0]])
    found = seen.after({"w": [tf.constant([[5.0, 6.0]]), tf.constant([[7.0]])]})
    assert found["weights/w"].tolist() == [1, 2, 4] and found["updates/w"].tolist() == [0, 0, 1]
    assert found["gradients/w"].tolist() == [5, 6, 7]
    # What was skipped is not looked at.
    seen.before(8)
    seen.before(9)
    assert list(seen.after({})) == ["weights/w", "updates/w"]


def test_gradients_are_the_plain_models(eagerly, tmp_path):
    def gradients(plain):
        options = Options(logdir=str(tmp_path), steps=1, histogram_every=1)
        model = RegisteredModel(small_models.SplitPoints(), "Points", plain=plain)
        trainer = Trainer(model, options)
        trainer.train_step()
        assert trainer.gradients.keys() == trainer.trained.learned().keys()
        return {
            name: np.concatenate([np.ravel(part) for part in parts])
            for name, parts in trainer.gradients.items()
        }

    found, wanted = gradients(False), gradients(True)
    assert found.keys() == wanted.keys() and not any("_slice_" in weight for weight in found)
    for weight, gradient in found.items():
        np.testing.assert_allclose(np.sort(gradient), np.sort(wanted[weight]), atol=1e-6)
        assert np.abs(gradient).max() > 0


def files(logdir):
    return list(logdir.glob("plugins/profile/*/*.xplane.pb"))


def test_a_training_writes_the_profile_of_its_steps(eagerly, tmp_path, capsys):
    assert trained(tmp_path, 5, profile_steps=(3, 4)) == 0
    (path,) = files(tmp_path)
    assert f"profile: {path.parent}\n" in capsys.readouterr().out
    (told,) = [event for event in events(tmp_path) if event["event"] == "profile"]
    assert (told["step"], told["path"]) == (4, str(path.parent))
    # What ran, and in which step.
    content = path.read_bytes()
    assert b"MatMul" in content and b"step_num" in content


def test_steps_that_do_not_come_are_missing_in_it(eagerly, tmp_path, capsys):
    assert trained(tmp_path, 5, stop=3, profile_steps=(2, 5)) == 143
    kinds = [event["event"] for event in events(tmp_path)]
    assert kinds[-1] == "end" and kinds.count("profile") == 1
    assert len(files(tmp_path)) == 1


def test_profiled_steps_may_be_done_already(eagerly, tmp_path, capsys):
    (tmp_path / "plugins").write_text("a file stands in its place")
    assert trained(tmp_path, 3, profile_steps=(2, 3)) == 0
    assert "there is no profile (" in capsys.readouterr().err
    # By default there are summaries, and no histograms.
    assert histograms(tmp_path) == {} and list(summaries(tmp_path))
    (tmp_path / "plugins").unlink()
    assert trained(tmp_path, 4, restore=tmp_path / "ckpt-3", profile_steps=(1, 2)) == 0
    assert "are done; there is no profile" in capsys.readouterr().err
    assert files(tmp_path) == []


def test_only_one_profile_may_run(tmp_path):
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        told = []
        profile = Profile(str(tmp_path), (1, 2), told.append)
        for step in (1, 2):
            with profile.around(step, step):
                pass
    finally:
        tf.profiler.experimental.stop()
    assert len(told) == 1 and told[0].startswith("there is no profile (")
    assert profile.written is None and os.listdir(tmp_path) == ["other"]
