"""Streams that nobody reads, progress, and signals while native code runs."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest

from pipemesh.training.run import console
from pipemesh.training.run.console import Progress, Stops


def program(code, **streams):
    code = f"import os, sys\nfrom pipemesh.training.run import console\n{code}"
    return subprocess.Popen([sys.executable, "-c", code], text=True, **streams)


CLOSED = """
console.stand_in()
for _ in range(3):
    print("x" * 100_000, flush=True)
print("y", file=sys.stderr, flush=True)
os.write(1, b"native code writes too")
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("out", "why"), [("pipe", "Broken pipe"), ("/dev/full", "No space left on device")]
)
def test_a_closed_output_is_reported_and_ends_nothing(out, why):
    if out == "/dev/full" and not os.path.exists(out):
        pytest.skip("needs /dev/full")
    read, write = os.pipe() if out == "pipe" else (None, os.open(out, os.O_WRONLY))
    if read is not None:
        os.close(read)
    # Standard error may be closed, too.
    both = program(CLOSED, stdout=write, stderr=write)
    process = program(CLOSED, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (7, f"standard output is closed ({why}); going on\ny\n")
    assert both.wait(timeout=60) == 7


def test_no_file_takes_the_number_of_a_closed_stream(tmp_path):
    code = f"""
os.close(1); os.close(2)
console.stand_in()
with open({str(tmp_path / "file")!r}, "w") as file:
    file.write("mine")
    file.flush()
    os.write(1, b"not mine")
    os.write(2, b"not mine")
"""
    assert program(code).wait(timeout=60) == 0
    assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture
def handler():
    """Sets the handler of a signal until the test ends; who runs the tests may ignore it."""
    before = {}

    def handler(number, function):
        before[number] = signal.signal(number, function)

    yield handler
    for number, function in before.items():
        signal.signal(number, function)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_noted_and_the_second_ends_at_once(handler, number):
    handler(number, signal.default_int_handler)
    stops = Stops()
    with stops:
        assert (stops.signal, stops.exit_code) == (None, 0)
        os.kill(os.getpid(), number)
        assert (stops.signal, stops.exit_code) == (number, 128 + number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is signal.default_int_handler


def test_an_ignored_signal_stays_ignored(handler):
    """As `nohup` starts a program."""
    handler(signal.SIGHUP, signal.SIG_IGN)
    stops = Stops()
    with stops:
        os.kill(os.getpid(), signal.SIGHUP)
    assert stops.signal is None


def test_progress_is_shown_once_it_takes_long(monkeypatch, capsys):
    monkeypatch.setattr(console, "_PATIENCE", {False: 0.05, True: 0.05})
    monkeypatch.setattr(console, "SECONDS_A_REFRESH", {False: 0.05, True: 0.05})
    with console.waiting("quick work"):
        pass
    assert capsys.readouterr().err == ""
    with console.waiting("long work"):
        time.sleep(0.5)
    lines = capsys.readouterr().err.splitlines()
    # How many seconds it takes is for the machine to say.
    assert len(lines) > 1 and lines[0] == "long work, 0 s"
    assert all(re.fullmatch(r"long work, \d+ s", line) for line in lines)


def test_work_aside_returns_and_raises():
    assert console.aside(lambda: threading.current_thread()) is not threading.main_thread()
    with pytest.raises(ZeroDivisionError):
        console.aside(lambda: 1 // 0)


@pytest.mark.slow
def test_a_signal_is_answered_while_a_vocabulary_is_learned():
    # SentencePiece runs for many seconds here, without a look at signals.
    code = """
import random, signal
from models.one_billion_word import vocabulary
from models.one_billion_word.corpus import Sentences
from pipemesh.commands import process
signal.signal(signal.SIGINT, process._leave)
rng = random.Random(0)
text = Sentences(tuple("".join(rng.choices("ACDEFGHIKLMNPQRSTVWY", k=900)) for _ in range(3000)))
print("begins", flush=True)
console.aside(lambda: vocabulary.train_vocabulary(text, 900))
"""
    process = program(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout.readline() == "begins\n"
        time.sleep(1)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, "interrupted\n")
        assert time.monotonic() - begin < 10
    finally:
        process.kill()


def test_work_meanwhile_ends_with_the_block():
    begun, may_end, done = threading.Event(), threading.Event(), []

    def work():
        begun.set()
        may_end.wait()
        done.append(True)
        raise ValueError("dropped")

    with console.meanwhile(work):
        assert begun.wait(10)
        assert not done
        may_end.set()
    assert done


def test_a_failed_block_does_not_wait_for_work_that_never_ends(monkeypatch):
    """A failed first step left its evaluation waiting, and its error was never shown."""
    monkeypatch.setattr(console, "_GRACE", 0.01)
    may_end = threading.Event()
    with pytest.raises(KeyError), console.meanwhile(may_end.wait):
        raise KeyError("of the block")
    may_end.set()


def test_objects_have_standard_output_for_themselves(capsys):
    console.say_object("nobody asked for it")
    with console.objects_alone(False):
        print("text")
        console.say_object("nobody asked for it")
    with pytest.raises(ValueError), console.objects_alone():
        print("text for people")
        console.say_object("{}")
        with console.objects_alone():
            console.say_object("[]")
        print("more of it")
        raise ValueError
    print("text again")
    with console.objects_alone():
        print("and more")
    print("text")
    assert capsys.readouterr() == (
        "text\n{}\n[]\ntext again\ntext\n",
        "text for people\nmore of it\nand more\n",
    )


CODE = """
import time
console.SECONDS_A_REFRESH[True] = 0.1
with console.Progress(done=10, total=13) as shown:
    with shown.busy("building the graph"):
        time.sleep(0.1)
    for number in range(3):
        time.sleep(0.2)
        shown.advance(f"loss {number}")
"""


def test_a_terminal_has_a_bar_that_is_written_over():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = program(CODE, stderr=theirs, stdin=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:
            break
        if not part:
            break
        seen += part
    os.close(ours)
    assert process.wait(60) == 0
    text = seen.decode()
    assert text.count("\n") == 1 and text.count("\r") >= 4
    assert re.search(r"77%\|.*\| 10/13 \[.*building the graph", text)
    assert re.search(r"100%\|.*\| 13/13 \[00:0\d<00:00, loss 2", text)


def test_a_log_has_a_line_now_and_then_and_at_the_end(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    with Progress(done=0, total=1000) as shown:
        for _ in range(100):
            now[0] += 1
            shown.advance("loss 2")
    out, err = capsys.readouterr()
    assert not out
    assert err.split("\n") == [
        "step 30 of 1,000, 00:30 so far, 16:10 to go, loss 2",
        "step 60 of 1,000, 01:00 so far, 15:40 to go, loss 2",
        "step 90 of 1,000, 01:30 so far, 15:10 to go, loss 2",
        "step 100 of 1,000, 01:40 so far, 15:00 to go, loss 2",
        "",
    ]


def test_long_work_is_reported_repeatedly(monkeypatch, capsys):
    monkeypatch.setitem(console.SECONDS_A_REFRESH, False, 0.05)
    with Progress(done=0, total=3) as shown, shown.busy("building the graph"):
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 6
    assert set(lines) == {"step 0 of 3, 00:00 so far, building the graph"}


def test_progress_without_steps_is_silent(capsys):
    with Progress(done=7, total=3):
        pass
    assert capsys.readouterr().err == ""
