"""The kind of devices that tests marked `gpu` compute on, which `PIPEMESH_TEST_DEVICES` sets."""

import os

# CPU, or GPU: then each GPU of this machine is cut into as many logical ones as tests need.
KIND = os.environ.get("PIPEMESH_TEST_DEVICES", "CPU")
if KIND not in ("CPU", "GPU"):
    raise ValueError(f"PIPEMESH_TEST_DEVICES is {KIND!r}; write CPU or GPU, or leave it out")


def device_name(number):
    """The name of a device."""
    return f"{KIND}:{number}"
