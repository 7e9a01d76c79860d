"""The rooms stand on their own."""

import ast
import functools
import importlib
import pathlib
import pkgutil
import subprocess
import sys

import pytest

import pipemesh

ROOT = pathlib.Path(__file__).parents[1]
PURE = [
    "pipemesh",
    "pipemesh.data",
    "pipemesh.errors",
    "pipemesh.mesh",
    "pipemesh.partition",
    "pipemesh.plan",
    "pipemesh.report",
    "pipemesh.schedule",
    "pipemesh.text",
]

# Parts of `Recurrent` and `StackedRecurrent`, whose tests in the same folder hold them.
TESTED_ELSEWHERE = {
    "recurrent": {f"time/test_{part}.py" for part in ("cell", "time_loop")},
}


def test_pure_rooms_load_neither_tensorflow_nor_lingvo():
    code = f"""
import importlib, sys
for room in {PURE}:
    importlib.import_module(room)
    loaded = {{"tensorflow", "lingvo", "keras"}} & set(sys.modules)
    assert not loaded, (room, loaded)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("missing", ["tensorflow", "lingvo"])
def test_other_rooms_say_in_one_line_what_is_missing(missing):
    code = f"""
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {missing!r} else real(name, *rest)
for room in ("backend", "randomness", "lowering", "recurrent", "layers", "decoding"):
    try:
        importlib.import_module("pipemesh." + room)
    except ImportError as error:
        wanted = "this part of pipemesh needs {missing}, which is not installed; in a checkout of"
        assert str(error).startswith(wanted), (room, error)
    else:
        raise AssertionError(f"no error of {{room}}")
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
    for folder in ("pipemesh", "models"):
        for path in (ROOT / folder).rglob("*.py"):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            assert lines <= 900, f"{path.relative_to(ROOT)} has {lines} lines; cut it in two"


@pytest.mark.parametrize("room", ["mesh", "partition", "plan", "recurrent", "report", "schedule"])
def test_every_module_with_logic_has_a_test_file_of_its_own(room):
    tests = pathlib.Path(__file__).parent / room
    modules = pathlib.Path(pipemesh.__file__).parent / room
    found = [path for path in modules.rglob("*.py") if path.name != "__init__.py"]
    large = [p for p in found if len(p.read_text(encoding="utf-8").splitlines()) > 40]
    wanted = {p.relative_to(modules).with_name(f"test_{p.name}") for p in large}
    missing = {path.as_posix() for path in wanted if not (tests / path).exists()}
    assert missing == TESTED_ELSEWHERE.get(room, set())


def test_no_module_imports_itself_by_way_of_others():
    own = {path: seen for path, seen in _seen().items() if path.is_relative_to(ROOT / "pipemesh")}
    names = {
        path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in own
    }
    imported = {}
    for path, (imports, _) in own.items():
        # Out of a package come modules and names.
        both = {module if module in names.values() else package for module, package in imports}
        imported[names[path]] = both - {names[path]}
    # Whatever imports nothing that is left is in no circle.
    while free := {name for name, needed in imported.items() if not needed & imported.keys()}:
        for name in free:
            del imported[name]
    assert not imported


# Underscored, but documented.
_DOCUMENTED = {"_asdict", "_exit", "_fields", "_getframe", "_make", "_replace"}
# What lingvo's layers are extended by.
_LINGVO = {
    "_AddEvalMetric",
    "_CreateLayerVariables",
    "_GetGlobalGradScale",
    "_InternalGetTheta",
    "_child_variable_scope_override",
    "_extra_theta",
    "_graphs_applied_ema",
    "_optimizer",
    "_private_theta",
    "_private_vars",
    "_self_variable_scope",
}


def test_only_backend_touches_what_tensorflow_keeps_private():
    found = [
        f"{path.relative_to(ROOT)}:{line} touches {what}"
        for path, (_, private) in _seen().items()
        for line, what in private
        if not path.is_relative_to(ROOT / "pipemesh" / "backend")
    ]
    assert not found, (
        "what others keep private belongs into a small function in pipemesh/backend:\n"
        + "\n".join(found)
    )


@pytest.mark.parametrize(
    "code, what",
    [
        ("from tensorflow.python.eager import context", "tensorflow.python.eager"),
        ("import tensorflow.core.framework", "tensorflow.core.framework"),
        ("from tensorflow import python", "tensorflow.python"),
        ("graph._get_function(1)", "_get_function"),
        ("x = tensor.op._id", "_id"),
        ("tf.__internal__.nest", "__internal__"),
        ("getattr(graph, '_captures', None)", "_captures"),
        ("layer._private_vars", "_private_vars"),
        ("class A:\n  def __init__(self): self._b = self.c._d", "_d"),
    ],
)
def test_what_is_private_is_seen(code, what):
    assert [name for _, name in _private(code, knows_lingvo=False)] == [what]


def test_what_is_ones_own_or_documented_is_not_private():
    code = """
class A:
    _made = 0
    def __init__(self, other):
        self._b = other._b, other._made, other._f(), A.__name__, os._exit
    def _f(self):
        return self._inherited
"""
    assert not _private(code, knows_lingvo=False)
    assert not _private("layer._private_vars", knows_lingvo=True)


def _private(source, knows_lingvo):
    """Returns the private names of others that code uses, with their lines."""
    return _private_of(list(ast.walk(ast.parse(source))), knows_lingvo)


@functools.cache
def _seen():
    """Of each module what it imports, and what it touches of others' private things."""
    found = {}
    for path in sorted(
        path for room in ("pipemesh", "models") for path in (ROOT / room).rglob("*.py")
    ):
        known = [ROOT / "models", ROOT / "pipemesh" / "layers", ROOT / "pipemesh" / "training"]
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        private = _private_of(nodes, any(map(path.is_relative_to, known)))
        found[path] = set(_imported(nodes)), private
    return found


def _private_of(nodes, knows_lingvo):
    own = _DOCUMENTED | (_LINGVO if knows_lingvo else set())
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if _is_self(node.value) else set()
    found = []
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if _is_private_module(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [node.module] if _is_private_module(str(node.module)) else []
            names = names or [name for name in inside if _is_private_module(name)]
        elif isinstance(node, ast.Attribute) and not _is_self(node.value):
            names = [node.attr]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            is_access = node.func.id in ("getattr", "hasattr", "setattr", "delattr")
            names = [a.value for a in node.args[1:2] if is_access and isinstance(a, ast.Constant)]
        found += [
            (node.lineno, name)
            for name in names
            if _is_private_module(name)
            or name == "__internal__"
            or (name.startswith("_") and not name.startswith("__") and name not in own)
        ]
    return found


def _is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_private_module(name):
    return name.split(".")[:2] in (["tensorflow", "python"], ["tensorflow", "core"])


def _imported(nodes):
    """Yields the names that a module imports, also those for types alone, and their packages."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node.module) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, alias.name) for alias in node.names)
