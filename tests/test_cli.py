"""The command `pipemesh` itself."""

import importlib
import subprocess
import sys

import pytest

from pipemesh import __version__
from pipemesh.cli import COMMANDS, HELP, PROGRAMS, main


def test_every_program_has_help_and_its_function():
    assert set(HELP) == {*COMMANDS, *PROGRAMS}
    for name in PROGRAMS.values():
        assert callable(importlib.import_module(name).main)


def test_every_command_has_the_two_functions():
    for name in COMMANDS.values():
        module = importlib.import_module(name)
        assert callable(module.add_arguments)
        assert callable(module.run)


@pytest.mark.parametrize("words", [["--help"], ["schedule", "--help"], ["--version"]])
def test_help_and_version(words, capsys):
    with pytest.raises(SystemExit) as info:
        main(words)
    assert info.value.code == 0
    out = capsys.readouterr().out
    assert "pipemesh" in out
    if words == ["--version"]:
        assert __version__ in out


@pytest.mark.parametrize("words", [[], ["schedule", "--devices", "four"]])
def test_wrong_words_end_with_usage_and_exit_code_2(words, capsys):
    with pytest.raises(SystemExit) as info:
        main(words)
    assert info.value.code == 2
    assert "usage: pipemesh" in capsys.readouterr().err


def test_the_schedule_command_loads_neither_tensorflow_nor_lingvo():
    code = (
        "import sys; from pipemesh.cli import main; "
        "main(['schedule', '--compare', '--devices', '2', '--microbatches', '2']); "
        "loaded = {'tensorflow', 'lingvo', 'pipemesh.partition', 'pipemesh.mesh'} & "
        "set(sys.modules); "
        "sys.exit(str(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_weights_of_others_are_a_matter_of_the_source(monkeypatch, capsys, tmp_path):
    """A wheel has no models: what is missing is said in a line."""
    monkeypatch.setitem(sys.modules, "models", None)
    monkeypatch.delitem(sys.modules, "models.pretrained.command", raising=False)
    monkeypatch.delitem(sys.modules, "models.pretrained", raising=False)
    assert main(["checkpoint", "import", "--from", "x", "--logdir", str(tmp_path / "run")]) == 2
    told = "which knows the models of others; it comes with the source of pipemesh"
    (line,) = capsys.readouterr().err.splitlines()
    assert "there is no module 'models" in line and told in line
    assert not (tmp_path / "run").exists()


def test_a_reader_that_stops_early_is_no_error():
    code = (
        "import sys; from pipemesh.cli import main; "
        "sys.exit(main(['schedule', '--name', 'gpipe', '--devices', '64', '--microbatches', '99']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""


def test_an_unknown_command_gets_the_nearest(capsys):
    assert main(["scedule"]) == 2
    assert capsys.readouterr().err == (
        "pipemesh: error: unknown command 'scedule'; did you mean 'schedule'? "
        f"known are {', '.join(sorted({*COMMANDS, *PROGRAMS}))}\n"
    )
