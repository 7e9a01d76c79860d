"""A program that is forked behaves as one that is started."""

import os
import pathlib
import signal
import subprocess
import time

from tests.warm import warm

WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


def start(code, **options):
    return subprocess.Popen(warm("-c", code), stdout=subprocess.PIPE, text=True, **options)


def test_streams_arguments_environment_and_folder_are_its_own(tmp_path):
    code = """
import os, sys
print(sys.argv, os.getcwd(), os.environ["SOME_NAME"], "tensorflow" in sys.modules)
print(sys.stdin.read(), file=sys.stderr)
sys.exit(7)
"""
    done = subprocess.run(
        warm("-c", code, "a b", 3),
        input="from a pipe",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "SOME_NAME": "some value"},
    )
    assert done.stdout == f"['-c', 'a b', '3'] {tmp_path} some value True\n"
    assert (done.stderr, done.returncode) == ("from a pipe\n", 7)


def test_what_lingvo_sets_in_the_environment_holds():
    """Programs drove workers otherwise than those that import lingvo themselves."""
    code = "import os; print(os.environ['TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE'])"
    assert subprocess.check_output(warm("-c", code), text=True) == "False\n"


def test_a_program_that_replaces_itself_need_not_load_anything_either():
    code = """
import os, sys
print("tensorflow" in sys.modules, flush=True)
if os.environ.setdefault("TURNS", "2") != "1":
    os.environ["TURNS"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
sys.exit(7)
"""
    done = subprocess.run(warm("-c", code), capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("True\n" * 2, "", 7)


def test_an_exception_is_told_and_the_exit_code_1():
    done = subprocess.run(warm("-c", "1 // 0"), capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ZeroDivisionError")


def test_a_signal_reaches_it_and_is_its_end():
    with start(WAITS, stderr=subprocess.DEVNULL) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == -signal.SIGINT


def runs(pid):
    try:
        # Who has ended may still wait for somebody to ask how.
        return ") Z " not in pathlib.Path("/proc", pid, "stat").read_text()
    except OSError:
        return False


def test_it_ends_with_who_stands_for_it():
    with start(WAITS) as process:
        pid = process.stdout.readline().strip()
        assert runs(pid)
        process.kill()
    end = time.monotonic() + 20
    while runs(pid):
        assert time.monotonic() < end
        time.sleep(0.01)
