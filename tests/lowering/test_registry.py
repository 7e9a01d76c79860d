"""One list of operations."""

import pathlib

import pytest

from pipemesh.lowering import op_list, registry


def test_the_readme_shows_the_table_of_the_registry():
    readme = pathlib.Path(registry.__file__).with_name("README.md").read_text(encoding="utf-8")
    assert readme.endswith("\n" + op_list.op_table() + "\n")


def test_a_name_is_registered_once_and_has_documentation():
    def add():
        """Is another one."""

    with pytest.raises(ValueError, match="registered twice; give it another name"):
        registry.register("elementwise")(add)
    # Not when it is registered: with `python -OO` no function has any.
    assert all(op.function.__doc__ for op in op_list.OPS.values())
