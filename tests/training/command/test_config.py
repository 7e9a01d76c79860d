"""Flags from a file."""

import types

import pytest
from absl import flags

from pipemesh.training.command import config

PROGRAM = types.ModuleType("tests_models_test_config_program")


@pytest.fixture(autouse=True)
def defined(monkeypatch):
    """Four flags of a program of their own."""
    values = flags.FlagValues()
    for define, name, default, kwargs in (
        (flags.DEFINE_string, "layout", None, {}),
        (flags.DEFINE_integer, "steps", 300, {"lower_bound": 0}),
        (flags.DEFINE_float, "rate", None, {}),
        (flags.DEFINE_boolean, "plain", False, {}),
    ):
        define(name, default, "", flag_values=values, **kwargs)
        values.register_key_flag_for_module(PROGRAM.__name__, values[name])
    monkeypatch.setattr(config, "FLAGS", values)
    return values


def parse(values, *arguments):
    values(["program", *arguments])


def test_the_command_line_comes_first(defined, tmp_path):
    parse(defined, "--steps=7")
    path = tmp_path / "run.toml"
    path.write_text('steps = 300\nlayout = "batch:data"  # Of replicas.\nplain = true\nrate = 1\n')
    taken = config.apply(config.read(str(path)), "here", PROGRAM)
    assert taken == {"layout": "batch:data", "plain": True, "rate": 1}
    assert (defined.steps, defined.layout, defined.plain, defined.rate) == (
        7,
        "batch:data",
        True,
        1.0,
    )
    assert config.given(PROGRAM) == {
        "steps": 7,
        "layout": "batch:data",
        "plain": True,
        "rate": 1.0,
    }


def test_what_is_written_is_read(defined, tmp_path):
    layout = 'a "quoted" \\ näme\n\x7f\x00\x1f\u2028'
    values = {"layout": layout, "steps": 3, "rate": 1e-30, "plain": False}
    path = tmp_path / "run.toml"
    path.write_text(config.as_toml(values), encoding="utf-8")
    assert config.read(str(path)) == values


def test_a_path_that_is_not_utf8_is_left_out_of_a_file(tmp_path):
    """It ended a training before its first step, by a UnicodeEncodeError."""
    path = tmp_path / "run.toml"
    path.write_text(config.as_toml({"text": "by\udcffte", "steps": 3}), encoding="utf-8")
    assert config.read(str(path)) == {"steps": 3}
    assert "# text is not UTF-8, which TOML has to be: 'by\\udcffte'" in path.read_text()


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbfsteps = 3\r\n")
    assert config.read(str(path)) == {"steps": 3}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('config = "other.toml"', "has 'config': a file of flags takes up no other one"),
        ("stepz = 3", "has 'stepz', which is no flag; did you mean 'steps'?"),
        ("[train]\nsteps = 3", "has 'train', which is no flag"),
        ("steps = [3]", "steps is a list; give text, a number, true or false"),
        ("steps = 1.5", "here: flag --steps=1.5"),
        ("steps = -1", "here: flag --steps=-1"),
        ('plain = "perhaps"', "here: flag --plain=perhaps"),
    ],
)
def test_what_no_flag_has_is_an_error(defined, tmp_path, text, told):
    parse(defined)
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(config.ConfigError) as caught:
        config.apply(config.read(str(path)), "here", PROGRAM)
    assert told in str(caught.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(config.ConfigError, match=r"no such.*cannot be read \(No such file"):
        config.read(str(tmp_path / "no such"))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe = 3")
    with pytest.raises(config.ConfigError, match="is no TOML"):
        config.read(str(tmp_path / "bytes"))
