"""The command `pipemesh launch`."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from pipemesh.commands.main import main
from tests.hosts.faults import LAUNCH, children, until


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--processes=0", "--", "true"], "--processes=0: it must be at least 1"),
        (["--processes=1", "--spares=-1", "--", "true"], "--spares=-1: it must be at least 0"),
        (["--processes=1"], "the command is missing; write it behind --"),
    ],
)
def test_invalid_launches_are_errors(words, told, capsys):
    assert main(["launch", *words]) == 2
    assert told in capsys.readouterr().err


def is_there(pid):
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


@contextlib.contextmanager
def launched(*words):
    process = subprocess.Popen(
        [*LAUNCH, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_output_and_exit_code_are_passed_on():
    code = (
        "import json, os, sys; print(os.environ['TF_CONFIG']); print('said', file=sys.stderr); "
        "sys.exit(7)"
    )
    with launched("--processes=1", "--spares=1", "--", sys.executable, "-c", code) as process:
        until(lambda: len(children(process.pid)) == 2, 30)
        workers = children(process.pid)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 7
    cluster = json.loads(out)["cluster"]
    assert len(cluster["worker"]) == len(cluster["spare"]) == 1
    assert cluster["worker"] != cluster["spare"]
    assert "said" in err
    assert not any(map(is_there, workers))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_workers_and_command_end_with_a_killed_launcher():
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    with launched("--processes=1", "--", sys.executable, "-c", code) as process:
        pids = [int(process.stdout.readline()), *children(process.pid)]
        assert len(pids) == 2
        # Who is stopped sees nothing end.
        os.kill(pids[1], signal.SIGSTOP)
        process.kill()
        until(lambda: not any(map(is_there, pids)), 20)


# A launcher that starts a worker once, unless it has listened.
START_ONCE = """
import sys
from pipemesh.commands import main as cli
from pipemesh.hosts import processes
processes._MOST_STARTS = 1
sys.exit(cli.main(["launch", "--processes=1", "--", "sleep", "300"]))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_worker_is_restarted(tmp_path):
    """Starts are counted only until it listens."""
    with (
        open(tmp_path / "err", "w+b") as err,
        subprocess.Popen([sys.executable, "-c", START_ONCE], stderr=err) as process,
    ):
        try:
            until(lambda: b"pipemesh worker:" in (tmp_path / "err").read_bytes(), 60)
            os.kill(*children(process.pid), signal.SIGKILL)
            until(lambda: b"it is started again" in (tmp_path / "err").read_bytes(), 60)
        finally:
            process.terminate()


AGAIN = """
import os, threading, time
from pipemesh.hosts.client import begin_again, has_begun_again
if not has_begun_again():
    threading.Thread(target=begin_again, args=["lost"]).start()
else:
    print(os.getpid(), flush=True)
time.sleep(100)
"""


@pytest.mark.timeout(60)
def test_a_restarted_command_ends_with_its_launcher(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(AGAIN)
    launcher = (
        "import subprocess, sys; from pipemesh.hosts.processes import ends_with_parent; "
        f"subprocess.run([sys.executable, {str(program)!r}], preexec_fn=ends_with_parent())"
    )
    words = [sys.executable, "-c", launcher]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        process.kill()
        until(lambda: not is_there(pid), 20)
