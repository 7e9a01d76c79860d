"""Unknown names."""

import pytest

from pipemesh.errors import ScheduleError
from pipemesh.schedule.names import check_name

KNOWN = ["zb_v", "one_f_one_b", "gpipe"]


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_name_comes_back(name):
    assert check_name("schedule", name, iter(KNOWN)) == name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("One-F-One-B", "did you mean 'one_f_one_b'? "),
        ("gpip", "did you mean 'gpipe'? "),
        ("wavelike", ""),
        (None, ""),
    ],
)
def test_another_is_an_error_with_the_nearest_and_all(name, hint):
    with pytest.raises(ScheduleError) as error:
        check_name("schedule", name, KNOWN)
    text = str(error.value)
    assert text == f"unknown schedule {name!r}; {hint}known are gpipe, one_f_one_b, zb_v"
