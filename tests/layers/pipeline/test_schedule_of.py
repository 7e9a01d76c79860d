"""The schedule that a pipeline's params ask for."""

import pytest
import tensorflow as tf
from lingvo.core import layers

from pipemesh.errors import PipelineError, ScheduleError
from pipemesh.layers import PipeliningLayer
from pipemesh.layers.pipeline.schedule_of import schedule_of
from pipemesh.schedule import gpipe, interleaved_one_f_one_b, one_f_one_b


def params(num_stages=2, **kwargs):
    cells = [layers.FetchLayer.Params().Set(name=f"s{i}") for i in range(num_stages)]
    return PipeliningLayer.Params().Set(
        **{"name": "stack", "cell_tpl": cells, "num_micro_batches": 4, **kwargs}
    )


def test_a_name_becomes_a_table_for_all_stages():
    assert schedule_of(params()) == gpipe(2, 4)
    assert schedule_of(params(schedule="1f1b", loss_inside=True)) == one_f_one_b(2, 4)
    found = schedule_of(params(4, schedule="interleaved:2", loss_inside=True))
    assert found == interleaved_one_f_one_b(2, 4, 2)


def test_a_table_is_taken_as_it_is():
    table = gpipe(2, 4)
    assert schedule_of(params(schedule=table)) is table


@pytest.mark.parametrize(
    ("num_stages", "kwargs", "error", "message"),
    [
        (0, {}, PipelineError, "cell_tpl is empty"),
        (2, {"num_micro_batches": 0}, PipelineError, "num_micro_batches is 0"),
        (
            2,
            {"schedule": "seq1f1b:2", "loss_inside": True},
            PipelineError,
            "the schedule cuts sequences into 2 slices, but layers take whole sequences",
        ),
        (2, {"micro_batch_size": 0}, PipelineError, "micro_batch_size is 0"),
        (2, {"batch_dim": -1}, PipelineError, "batch_dim is -1"),
        (2, {"pipelined": None}, PipelineError, "pipelined is None; it must be True or False$"),
        (2, {"loop": 1}, PipelineError, "loop is 1; it must be True, False or None"),
        (2, {"state_dtype": tf.int32}, PipelineError, "state_dtype is"),
        (
            2,
            {"loss_inside": True, "nested_map_fprop": True},
            PipelineError,
            "with loss_inside the last layer returns scalars",
        ),
        (
            2,
            {"pipelined": False, "fprop_dtype": tf.float16},
            PipelineError,
            ".*the loss is not scaled, which float16 needs",
        ),
        (2, {"schedule": "nonsense"}, ScheduleError, ".*1f1b"),
        (
            3,
            {"schedule": "interleaved:2", "loss_inside": True},
            PipelineError,
            r"schedule 'interleaved:2' has 2 stages a device, .* cut the layers into 2 stages",
        ),
        (
            1,
            {"schedule": "interleaved:2", "loss_inside": True},
            PipelineError,
            r"schedule 'interleaved:2' .* into 2 stages",
        ),
        (3, {"schedule": gpipe(2, 4)}, PipelineError, "the schedule has 2 stages and 4 micro"),
        (2, {"schedule": gpipe(2, 8)}, PipelineError, r".*2 stages and 8 microbatches, .* is 4"),
        (
            2,
            {"schedule": "1f1b"},
            ScheduleError,
            "schedule '1f1b' starts backward .*loss_inside=Tr",
        ),
        (2, {"schedule": one_f_one_b(2, 4)}, ScheduleError, "its schedule starts backward passes"),
    ],
)
def test_params_that_contradict_are_errors(num_stages, kwargs, error, message):
    with pytest.raises(error, match=f"^stack: {message}"):
        schedule_of(params(num_stages, **kwargs))
