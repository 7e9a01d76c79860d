"""The rooms stand on their own."""

import importlib
import pathlib
import pkgutil
import subprocess
import sys

import pytest

import pipemesh

PURE = [
    "pipemesh",
    "pipemesh.errors",
    "pipemesh.mesh",
    "pipemesh.partition",
    "pipemesh.schedule",
    "pipemesh.schedule_names",
    "pipemesh.text",
]


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_load_neither_tensorflow_nor_lingvo(room):
    code = f"""
import sys
import {room}
loaded = {{"tensorflow", "lingvo", "keras"}} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_public_name_has_a_docstring():
    for module in pkgutil.walk_packages(pipemesh.__path__, "pipemesh."):
        door = importlib.import_module(module.name)
        assert door.__doc__, module.name
        for name in getattr(door, "__all__", ()):
            thing = getattr(door, name)
            assert not callable(thing) or thing.__doc__, f"{module.name}.{name}"


def test_modules_stay_small():
    root = pathlib.Path(__file__).parents[1]
    for folder in ("pipemesh", "models"):
        for path in (root / folder).rglob("*.py"):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            assert lines <= 420, f"{path.relative_to(root)} has {lines} lines; cut it in two"
