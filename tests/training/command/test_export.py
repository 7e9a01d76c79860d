"""Where a model may be exported to."""

import types

import pytest

from pipemesh.training.command import export
from pipemesh.training.command.flags import FlagError


def test_a_model_is_not_written_where_tensorflow_cannot_load_it(monkeypatch, tmp_path):
    monkeypatch.setattr(export, "FLAGS", types.SimpleNamespace(to=str(tmp_path / "lr[0.1]")))
    with pytest.raises(FlagError, match=r"loads no model from a path with \[ or"):
        export.asked()
    assert not list(tmp_path.iterdir())
