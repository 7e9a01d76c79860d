"""The devices of a stage, by whichever way they were named."""

import pytest

from pipemesh.errors import DeviceError
from pipemesh.recurrent import Home


@pytest.mark.parametrize("names", [["CPU:0", "CPU:1"], ("CPU:0", "CPU:1")])
def test_names_of_devices_are_a_home(names):
    home = Home(("CPU:0", "CPU:1"))
    assert Home(names) == Home.of(names) == Home.of(home) == home
    assert hash(Home(names)) == hash(home)
    assert Home("CPU:0") == Home.of("CPU:0") == Home(("CPU:0",))
    assert Home.of(home) is home


def test_a_home_keeps_the_order_of_its_devices():
    home = Home(("GPU:1", "GPU:0"))
    assert (home.first, len(home), str(home)) == ("GPU:1", 2, "GPU:1, GPU:0")
    assert home != Home(("GPU:0", "GPU:1"))


@pytest.mark.parametrize("devices", [(), ("CPU:0", 1), 5, None])
@pytest.mark.parametrize("make", [Home, Home.of])
def test_a_home_has_devices(make, devices):
    with pytest.raises(DeviceError, match="give names of one or several") as caught:
        make(devices)
    assert repr(devices) in str(caught.value)
