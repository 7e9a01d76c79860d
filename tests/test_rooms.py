"""The rooms stand on their own."""

import ast
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
    "pipemesh.plan",
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


@pytest.mark.parametrize("room", ["backend", "randomness", "lowering", "recurrent", "layers"])
@pytest.mark.parametrize("missing", ["tensorflow", "lingvo"])
def test_other_rooms_say_in_one_line_what_is_missing(room, missing):
    code = f"""
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {missing!r} else real(name, *rest)
try:
    import pipemesh.{room}
except ImportError as error:
    wanted = "this part of pipemesh needs {missing}, which is not installed: pip install 'pipemesh["
    assert str(error).startswith(wanted), error
else:
    raise AssertionError("no error")
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


def test_no_module_imports_itself_by_way_of_others():
    root = pathlib.Path(pipemesh.__file__).parent
    paths = {}
    for path in root.rglob("*.py"):
        name = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        paths[name.removesuffix(".__init__")] = path
    imported = {name: _imported(path, paths.keys()) - {name} for name, path in paths.items()}
    # Whatever imports nothing that is left is in no circle.
    while free := {name for name, needed in imported.items() if not needed & imported.keys()}:
        for name in free:
            del imported[name]
    assert not imported


def _imported(path, modules):
    """The modules that a module imports at any place, also where it is only for types."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            # Out of a package come modules and names.
            both = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
            found |= {module if module in modules else package for module, package in both}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found
