"""Labels of stages and layers in node names, prints and summaries."""

import pytest
import tensorflow as tf

from pipemesh.backend.labels import label, label_scope, labelled, tagged
from pipemesh.randomness import layer_scope, plan_free_randomness


@pytest.mark.parametrize("name", ["block3", "block#1", "a/b-c.d e", "Schicht-ä", "", "-2d-"])
def test_any_name_comes_back_from_the_name_of_a_node(name):
    node = f"action_1F0/{label('layer', name)}/MatMul"
    assert labelled("layer", node) == name
    assert labelled("stage", node) is None


def test_a_layer_that_is_entered_twice_keeps_its_name():
    with tf.Graph().as_default() as graph, tf.name_scope("outer"), label_scope("stage", "s"):
        for _ in range(2):
            with plan_free_randomness(None), layer_scope("block"), layer_scope("inner"):
                tf.zeros([])
    names = [op.name for op in graph.get_operations()]
    assert names == ["outer/stage.s/layer.block/zeros", "outer/stage.s/layer.block/zeros_1"]
    assert {labelled("layer", name) for name in names} == {"block"}
    assert {labelled("stage", name) for name in names} == {"s"}


def three():
    return tf.constant(3, tf.int64)


def test_prints_begin_with_stage_and_microbatch(tmp_path):
    path = f"file://{tmp_path / 'told'}"
    with tagged("s0", three()):
        tf.print("seen", 1, output_stream=path)
        with tagged("s1", tf.constant(4, tf.int64), replica=2):
            tf.print("inner", output_stream=path)
        tf.print("again", output_stream=path)
    tf.print("outside", output_stream=path)
    assert (tmp_path / "told").read_text().splitlines() == [
        "stage 's0', microbatch 3: seen 1",
        "stage 's1', microbatch 4, replica 2: inner",
        "stage 's0', microbatch 3: again",
        "outside",
    ]


def test_a_print_of_tf1_has_them_as_well(capfd):
    with tagged("s0", three()):
        tf.compat.v1.Print(tf.zeros([]), [tf.constant(7)], message="saw ")
    tf.compat.v1.Print(tf.zeros([]), [tf.constant(8)], message="saw ")
    assert capfd.readouterr().err.replace("\\", "").splitlines() == [
        "saw [stage 's0', microbatch 3: ][7]",
        "saw [8]",
    ]


def test_the_microbatch_may_be_known_only_when_the_step_runs(tmp_path):
    path = f"file://{tmp_path / 'told'}"

    @tf.function
    def run(microbatch):
        with tagged("s0", microbatch):
            tf.print("seen", output_stream=path)

    run(three())
    run(three() + 1)
    assert (tmp_path / "told").read_text().splitlines() == [
        f"stage 's0', microbatch {m}: seen" for m in (3, 4)
    ]


@pytest.mark.parametrize(("replica", "end"), [(None, ""), (1, "/replica_1")])
@pytest.mark.parametrize(
    "write",
    [
        lambda: tf.compat.v1.summary.scalar("here", 1.0),
        lambda: tf.compat.v1.summary.histogram("here", [1.0, 2.0]),
        lambda: tf.compat.v1.summary.image("here", tf.zeros([1, 2, 2, 1]), max_outputs=1),
        lambda: tf.compat.v1.summary.tensor_summary("here", tf.zeros([2])),
    ],
    ids=["scalar", "histogram", "image", "tensor"],
)
def test_tags_of_summaries_of_tf1_end_in_the_microbatch(write, replica, end):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        with tagged("s0", three(), replica):
            written = session.run(write())
        plain = session.run(write())
    (inside,) = tf.compat.v1.Summary.FromString(written).value
    (outside,) = tf.compat.v1.Summary.FromString(plain).value
    assert f"/microbatch_3{end}" in inside.tag and "here" in inside.tag
    assert "microbatch" not in outside.tag


def test_a_failing_stage_leaves_no_tag_behind(tmp_path):
    writer = tf.summary.create_file_writer(str(tmp_path))
    with writer.as_default(step=5):
        with pytest.raises(ValueError, match="stage"), tagged("s0", three()):
            tf.summary.scalar("in", 1.0)
            raise ValueError("stage")
        tf.summary.scalar("out", 2.0)
    writer.close()
    (path,) = tmp_path.glob("events*")
    tags = {
        value.tag
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator()
        for value in tf.compat.v1.Event.FromString(record).summary.value
    }
    assert tags == {"in/microbatch_3", "out"}


def test_a_label_is_hexadecimal_between_hyphens():
    assert label("layer", "block#1") == "layer.block-23-1"
