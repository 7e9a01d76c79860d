"""Changes lines of the library at random and lists the tests that notice.

    python -m tests.mutants schedule partition --mutants=100

A mutant is a copy of the library with one small change: another comparison or operator, a number
one higher, a negated condition, a statement left out. Every test function that runs the changed
line is run once with it. A mutant that no test notices is a hole in the tests. A test that
notices no mutant, or none that another test does not notice too, may be superfluous.
"""

import argparse
import ast
import collections
import dataclasses
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

import coverage

ROOT = pathlib.Path(__file__).resolve().parents[1]
_COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One small change of a module.

    Attributes:
        path: the module, from the root.
        line: the changed line.
        number: the position among all changes of the module.
        text: the changed line as it reads now.
    """

    path: str
    line: int
    number: int
    text: str


class _Change(ast.NodeTransformer):
    """Makes the change with a number, or counts all changes if the number is None."""

    def __init__(self, number):
        self.number = number
        self.lines = []
        self.changed = None

    def _is_chosen(self, node):
        self.lines.append(node.lineno)
        return self.number == len(self.lines) - 1

    def _note(self, node):
        self.changed = node
        return ast.copy_location(node, node)

    def visit_Compare(self, node):
        self.generic_visit(node)
        for position, operator in enumerate(node.ops):
            if type(operator) in _COMPARISONS and self._is_chosen(node):
                node.ops[position] = _COMPARISONS[type(operator)]()
                self._note(node)
        return node

    def visit_BinOp(self, node):
        self.generic_visit(node)
        if type(node.op) in _OPERATORS and self._is_chosen(node):
            node.op = _OPERATORS[type(node.op)]()
            self._note(node)
        return node

    def visit_BoolOp(self, node):
        self.generic_visit(node)
        if self._is_chosen(node):
            node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
            self._note(node)
        return node

    def visit_Constant(self, node):
        if type(node.value) in (int, float, bool) and self._is_chosen(node):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            self.changed = ast.copy_location(ast.Constant(value), node)
            return self.changed
        return node

    def visit_If(self, node):
        self.generic_visit(node)
        if self._is_chosen(node):
            node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
            self._note(node.test)
        return node

    def visit_Expr(self, node):
        self.generic_visit(node)
        if isinstance(node.value, ast.Call) and self._is_chosen(node):
            self.changed = ast.copy_location(ast.Pass(), node)
            return self.changed
        return node

    def visit_Return(self, node):
        self.generic_visit(node)
        if node.value is not None and self._is_chosen(node):
            node.value = ast.copy_location(ast.Constant(None), node.value)
            self._note(node)
        return node

    def visit_AnnAssign(self, node):
        # Annotations are not run.
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arguments(self, node):
        node.defaults = [self.visit(default) for default in node.defaults]
        node.kw_defaults = [default and self.visit(default) for default in node.kw_defaults]
        return node

    def visit_FunctionDef(self, node):
        node.args = self.visit(node.args)
        node.body = [self.visit(statement) for statement in node.body]
        return node


def changes_of(source):
    """Returns the line of every change that a module allows, by number."""
    counted = _Change(None)
    counted.visit(ast.parse(source))
    return counted.lines


def changed(source, number):
    """Returns a module with one change, and the changed expression as text."""
    change = _Change(number)
    tree = ast.fix_missing_locations(change.visit(ast.parse(source)))
    return ast.unparse(tree), ast.unparse(change.changed)


def draw(folder, rooms, count, seed):
    """Draws mutants, every change of the rooms with the same chance."""
    changes = []
    for room in rooms:
        for path in sorted((folder / "pipemesh" / room).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            name = path.relative_to(folder).as_posix()
            changes += [(name, line, n) for n, line in enumerate(changes_of(source))]
    chosen = random.Random(seed).sample(changes, min(count, len(changes)))
    mutants = []
    for name, line, number in sorted(chosen):
        text = changed((folder / name).read_text(encoding="utf-8"), number)[1]
        mutants.append(Mutant(name, line, number, text))
    return mutants


def tests_by_line(folder, paths):
    """Runs the tests once and returns, by module and line, the test functions that run it."""
    settings = folder / "mutants.coveragerc"
    settings.write_text(
        "[run]\ndynamic_context = test_function\nsource = pipemesh\ndata_file = mutants.coverage\n",
        encoding="utf-8",
    )
    command = ["-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q", *paths]
    subprocess.run([sys.executable, *command], cwd=folder, check=True)
    data = coverage.CoverageData(folder / "mutants.coverage")
    data.read()
    lines = {}
    for file in data.measured_files():
        name = pathlib.Path(file).relative_to(folder).as_posix()
        for line, contexts in data.contexts_by_lineno(file).items():
            lines[name, line] = {_node(context) for context in contexts if context}
    return lines


def _node(context):
    """Returns pytest's name of a test function, such as `tests.a.test_b.test_c`."""
    parts = context.split(".")
    module = next(n for n, part in enumerate(parts) if n and part.startswith("test_")) + 1
    return "::".join(["/".join(parts[:module]) + ".py", *parts[module:]])


def noticed(folder, mutant, nodes, seconds):
    """Returns the test functions that fail with a mutant."""
    path = folder / mutant.path
    source = path.read_text(encoding="utf-8")
    path.write_text(changed(source, mutant.number)[0], encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "-rfE"]
    try:
        done = subprocess.run(
            [*command, *sorted(nodes)], cwd=folder, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        # All of them may be what hangs.
        return set(nodes)
    finally:
        path.write_text(source, encoding="utf-8")
    if done.returncode not in (0, 1):
        return set(nodes)
    failed = [
        line.split(" ")[1] for line in done.stdout.splitlines() if line[:5] in ("FAILE", "ERROR")
    ]
    return {name.partition("[")[0] for name in failed}


def main():
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rooms", nargs="+", help="folders of pipemesh/ that are changed")
    parser.add_argument("--tests", nargs="*", help="tests to run (those of the rooms)")
    parser.add_argument("--mutants", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300, help="time limit of one mutant")
    parser.add_argument("--json", help="write who noticed what to this file")
    arguments = parser.parse_args()
    paths = arguments.tests or [f"tests/{room}" for room in arguments.rooms]
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary).resolve()
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
        for name in filter(None, files.stdout.decode().split("\0")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
        lines = tests_by_line(folder, paths)
        rows = []
        for mutant in draw(folder, arguments.rooms, arguments.mutants, arguments.seed):
            nodes = lines.get((mutant.path, mutant.line), set())
            failed = noticed(folder, mutant, nodes, arguments.seconds) if nodes else set()
            rows.append((mutant, nodes, failed))
            print(
                f"{mutant.path}:{mutant.line}  {mutant.text[:60]!r}: {len(failed)} of {len(nodes)} "
                "tests notice",
                flush=True,
            )
    _summary(rows)
    if arguments.json:
        found = [(dataclasses.asdict(m), sorted(ran), sorted(failed)) for m, ran, failed in rows]
        pathlib.Path(arguments.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


def _summary(rows):
    survivors = [mutant for mutant, _, failed in rows if not failed]
    print(f"\n{len(survivors)} of {len(rows)} mutants are noticed by no test")
    runs, notices, alone = (collections.Counter() for _ in range(3))
    for _, nodes, failed in rows:
        runs.update(nodes)
        notices.update(failed)
        if len(failed) == 1:
            alone.update(failed)
    print("\ntests that are never the only one to notice: mutants run, noticed")
    for name in sorted(runs, key=lambda name: (notices[name], -runs[name], name)):
        if not alone[name]:
            print(f"{runs[name]:5} {notices[name]:5}  {name}")


if __name__ == "__main__":
    main()
