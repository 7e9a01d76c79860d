"""What may be a number of devices or microbatches."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule.checks import check_counts

NUMPY = st.sampled_from([int, np.int8, np.int32, np.uint64])


@given(st.lists(st.tuples(st.integers(1, 100), NUMPY), max_size=4))
def test_counts_come_back_as_pythons_integers_in_the_order_given(given_counts):
    counts = {f"c{index}": kind(value) for index, (value, kind) in enumerate(given_counts)}
    checked = check_counts(**counts)
    assert checked == tuple(value for value, _ in given_counts)
    assert all(type(count) is int for count in checked)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (0, "stages is 0; it must be at least 1"),
        (np.int64(-2), "stages is -2; it must be at least 1"),
        (2.0, "stages is 2.0; it must be an integer"),
        (None, "stages is None; it must be an integer"),
        ("3", "stages is '3'; it must be an integer"),
    ],
)
def test_the_first_that_is_none_is_named(bad, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        check_counts(devices=1, stages=bad, microbatches=0)
