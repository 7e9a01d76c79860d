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


# A launcher that starts a worker once, unless it has listened.
START_ONCE = """
import sys
from pipemesh.commands import main as cli
from pipemesh.hosts import processes
processes._MOST_STARTS = 1
sys.exit(cli.main(["launch", *sys.argv[1:]]))
"""
TELL = """
import os, sys
print(os.environ["TF_CONFIG"], flush=True)
sys.stdin.readline()
print("said", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_killed_worker_is_restarted_and_output_and_exit_code_are_passed_on(tmp_path):
    launcher = [sys.executable, "-c", START_ONCE, "--processes=1", "--spares=1", "--"]
    with (
        open(tmp_path / "err", "wb") as err,
        subprocess.Popen(
            [*launcher, sys.executable, "-c", TELL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        ) as process,
    ):
        try:
            cluster = json.loads(process.stdout.readline())["cluster"]
            assert len(cluster["worker"]) == len(cluster["spare"]) == 1
            assert cluster["worker"] != cluster["spare"]

            def count(text):
                return (tmp_path / "err").read_bytes().count(text)

            # One that has listened is started again any number of times.
            os.kill(children(process.pid)[0], signal.SIGKILL)
            until(lambda: count(b"it is started again") == 1, 60)
            until(lambda: count(b"pipemesh worker:") == 3, 60)
            os.kill(children(process.pid)[-1], signal.SIGKILL)
            until(lambda: count(b"it is started again") == 2, 60)
            until(lambda: count(b"pipemesh worker:") == 4, 60)
            until(lambda: len(children(process.pid)) == 2, 30)
            workers = children(process.pid)
            process.communicate("\n", timeout=60)
            assert process.returncode == 7
            assert not any(map(is_there, workers))
        finally:
            process.kill()
    assert b"said" in (tmp_path / "err").read_bytes()


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
