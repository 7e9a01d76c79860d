"""The command `pipemesh` itself."""

import importlib
import subprocess
import sys

import pytest

from pipemesh import __version__
from pipemesh.checkpoint.manifest import Manifest
from pipemesh.commands import process
from pipemesh.commands.main import HELP, MODULES, PROGRAMS, main


def test_every_command_has_help_and_a_main_function():
    assert set(PROGRAMS) < set(HELP)
    for name in HELP:
        module = importlib.import_module(f"pipemesh.commands.{MODULES.get(name, name)}")
        assert callable(getattr(module, name if name in MODULES else "main"))


@pytest.mark.parametrize(
    "words", ["--help", "help", "help schedule", "schedule --help", "--version", "version"]
)
def test_help_and_version(words, capsys):
    try:
        assert main(words.split()) == 0
    except SystemExit as end:
        assert end.code == 0
    out = capsys.readouterr().out
    is_version = "version" in words
    assert out.startswith(f"pipemesh {__version__}\n" if is_version else "usage: pipemesh")


def python(code, **changes):
    done = [sys.executable, "-c", code]
    return subprocess.run(done, capture_output=True, text=True, check=False, **changes)


def test_the_schedule_command_loads_neither_tensorflow_nor_lingvo():
    code = (
        "import sys; from pipemesh.commands.main import main; "
        "main(['schedule', '--compare', '--devices', '2', '--num_microbatches', '2']); "
        "loaded = {'tensorflow', 'lingvo', 'pipemesh.partition', 'pipemesh.mesh'} & "
        "set(sys.modules); "
        "sys.exit(str(loaded) if loaded else 0)"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_without_a_command_all_are_listed(capsys):
    assert main([]) == 2
    told = capsys.readouterr().err
    assert all(f"\n  {name} " in told and help in told for name, help in HELP.items())


def test_a_folder_called_models_hides_no_example(tmp_path):
    """The wheel calls the examples `pipemesh_models`; checkpoints may have either name."""
    for name in ("models/__init__.py", "pipemesh_models/__init__.py", "pipemesh_models/digits.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    code = (
        "from pipemesh.example_models import example, import_model_module as load\n"
        "print(example('digits'), load('models.digits').__name__)\n"
        "load('models.nothing')"
    )
    done = python(code, cwd=tmp_path)
    assert done.stdout == "pipemesh_models.digits pipemesh_models.digits\n"
    assert done.stderr.endswith("No module named 'models.nothing'\n")


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["schedule", "--name=gpipe", "--devices=64", "--num_microbatches=99"], 1),
        (["--help"], 0),
    ],
)
def test_a_reader_that_stops_early_is_no_error(words, lines):
    code = f"import sys; from pipemesh.commands.main import main; sys.exit(main({words}))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for _ in range(lines):
            process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 0


def test_an_unknown_command_gets_the_nearest(capsys):
    assert main(["scedule"]) == 2
    assert capsys.readouterr().err == (
        f"error: unknown command 'scedule'; did you mean 'schedule'? known are {', '.join(HELP)}\n"
    )


KIND = """
from pipemesh.commands.model_kind import RegisteredKind
from pipemesh.errors import DecodingError
class Telling(RegisteredKind):
    def texts(self, command, texts):
        raise DecodingError("told")
KIND = Telling()
"""


def test_the_installed_command_finds_the_models_of_the_folder_where_it_is_called(tmp_path):
    folder, run = tmp_path / "project", tmp_path / "run"
    script = tmp_path / "bin" / "pipemesh"
    for each in (folder, run, script.parent):
        each.mkdir()
    (folder / "telling.py").write_text(KIND)
    (folder / "lacking.py").write_text("import no_such_module\n")
    script.write_text("from pipemesh.commands.main import main\nmain()\n")

    def called(where, program):
        (run / "ckpt-1.index").touch()
        note = {"decoded_by": program}
        Manifest.of(str(run / "ckpt-1"), step=1, note=note).write(str(run / "ckpt-1"))
        words = [sys.executable, script, "decode", f"--logdir={run}", "--prompt=a"]
        done = subprocess.run(words, cwd=where, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    assert called(folder, "telling") == (2, "", "error: told\n")
    code, out, err = called(tmp_path, "telling")
    assert (code, out) == (2, "")
    assert err == (
        "error: the checkpoint is of telling, and there is no module 'telling' here; call from the "
        "folder in which the package lies, or put that folder on PYTHONPATH\n"
    )
    # What the program itself lacks is told as it is.
    code, out, err = called(folder, "lacking")
    assert code == 1 and "No module named 'no_such_module'" in err


def test_only_warnings_of_the_library_come_without_their_line_of_code():
    told = process._line_of_warning("it idles", UserWarning, process.__file__, 3)
    assert told == "warning: it idles\n"
    told = process._line_of_warning("it idles", UserWarning, __file__, 3, line="code")
    assert told.startswith(f"{__file__}:3: UserWarning: it idles\n")
