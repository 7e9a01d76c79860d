"""A stage knows its devices, however its home was given."""

import pytest

from pipemesh.errors import DeviceError, PipelineError
from pipemesh.recurrent import Home, Stage


def stage(home):
    return Stage("s", lambda *arguments: ([], []), [], [], home)


@pytest.mark.parametrize(
    "home",
    [("CPU:1", "CPU:0"), ["CPU:1", "CPU:0"], Home(("CPU:1", "CPU:0"))],
    ids=["tuple", "list", "home"],
)
def test_a_stage_has_a_home_whatever_names_its_devices(home):
    assert stage(home).home == Home(("CPU:1", "CPU:0"))
    assert stage(home).devices == ("CPU:1", "CPU:0")
    assert stage(home).device == "CPU:1"


def test_one_device_is_a_home_of_one():
    assert stage("CPU:2").home == Home(("CPU:2",))
    assert stage("CPU:2").devices == ("CPU:2",)


def test_by_default_a_stage_is_not_recurrent_and_has_the_dtypes_of_the_pipeline():
    assert stage("CPU:0").recurrent is False
    assert stage("CPU:0").dtypes is None


@pytest.mark.parametrize("fetched", [{2}, {-1, 0}, {1}])
def test_weights_that_are_fetched_are_weights_and_no_copies(fetched):
    with pytest.raises(PipelineError, match=r"stage 's' fetches \[.*of its 2 weights"):
        Stage("s", lambda *_: ([], []), [1.0, 1.0], [], "CPU:0", copies={1: 0}, fetched=fetched)


@pytest.mark.parametrize("home", [(), 3])
def test_a_stage_lies_somewhere(home):
    with pytest.raises(DeviceError, match="give names of one or several"):
        stage(home)
