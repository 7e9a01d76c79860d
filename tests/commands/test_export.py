"""Targets that a model may be exported to."""

import pytest

from pipemesh.commands.export import EXPORT_FLAGS, _set_plain
from pipemesh.commands.flags import FLAGS, FlagError


def test_a_model_is_not_written_where_tensorflow_cannot_load_it(tmp_path):
    FLAGS.declare(EXPORT_FLAGS)
    FLAGS.set("to", str(tmp_path / "lr[0.1]"))
    with pytest.raises(FlagError, match=r"loads no model from a path with \[ or"):
        _set_plain()
    assert not list(tmp_path.iterdir())
