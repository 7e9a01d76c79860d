"""Which curves a page has."""

import re

from pipemesh.report import Record, read
from pipemesh.report.curves import curves, curves_of, names_of
from tests.report import records


def titles(figures):
    return [re.search("<title>(.*?)</title>", text)[1] for text in figures]


def test_the_loss_comes_first_and_what_is_of_training_alone_last(tmp_path):
    run = read(str(records.whole(tmp_path)))
    found = titles(curves(run))
    assert found[0] == "loss" and found[-3:] == ["learning rate", "tokens per second", "MFU"]
    assert {"bits per byte", "token perplexity"} == set(found[1:-3])


def test_training_held_out_and_end_are_over_each_other(tmp_path):
    loss = next(curves(read(str(records.whole(tmp_path)))))
    for name in ("training", "held out", "held out, at the end"):
        assert f"; {name}: " in loss or f": {name}: " in loss
    # Twelve steps of training, six of held-out data, all of which training has or has not.
    assert 13 <= loss.count("<tr>") <= 1 + 12 + 6 + 1


def test_values_that_never_were_a_number_have_no_picture(tmp_path):
    record = Record(str(tmp_path))
    record.add("step", step=1, loss=1.0, accuracy=float("nan"))
    assert names_of([read(str(tmp_path))]) == ["loss"]


def test_of_two_runs_training_and_held_out_data_have_one_scale(tmp_path):
    for name, level in (("a", 1.0), ("b", 9.0)):
        (tmp_path / name).mkdir()
        records.whole(tmp_path / name, level=level)
    runs = [read(str(tmp_path / name)) for name in "ab"]
    figures = list(curves_of(runs, ["a", "b"]))
    assert titles(figures)[:2] == ["loss, training", "loss, held out"]
    axes = [re.findall(r"dominant-baseline='central'>(.*?)</text>", f) for f in figures[:2]]
    assert axes[0] == axes[1] != []


def test_of_several_runs_the_evaluation_at_the_end_is_a_ring(tmp_path):
    """Only where no run was judged while training was it to be seen."""
    runs = []
    for name, make in (("a", records.whole), ("b", records.plain)):
        (tmp_path / name).mkdir()
        runs.append(read(str(make(tmp_path / name))))
    loss = list(curves_of(runs, ["a", "b"]))[1]
    assert titles([loss]) == ["loss, held out"]
    assert "a, at the end, step 300: 3.1</title></circle>" in loss
    assert "b, at the end, step 30: 4.5</title></circle>" in loss
    # The colour of a line says which run a ring is of.
    legend = re.findall(r"y='41'>(.*?)</text>", loss)
    assert legend == ["a", "b, at the end"] and "Rings: the evaluation at the end." in loss
