"""Progress on a terminal, and in a log."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time

from pipemesh.training.run import progress
from pipemesh.training.run.progress import Progress

CODE = """
import sys, time
from pipemesh.training.run.progress import Progress
with Progress(done=10, total=13) as shown:
    with shown.busy("building the graph"):
        time.sleep(0.1)
    for number in range(3):
        time.sleep(1.1)
        shown.advance(f"loss {number}")
"""


def test_a_terminal_has_a_bar_that_is_written_over():
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", CODE], stderr=theirs, stdin=theirs)
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


def test_a_log_has_a_line_at_the_end_and_no_returns():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"step 13 of 13, 00:0\d so far, loss 2\n", done.stderr)
    assert done.stdout == ""


def test_a_log_has_a_line_now_and_then(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress(done=0, total=1000) as shown:
        for _ in range(100):
            now[0] += 1
            shown.advance("loss 2")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "step 30 of 1,000, 00:30 so far, 16:10 to go, loss 2",
        "step 60 of 1,000, 01:00 so far, 15:40 to go, loss 2",
        "step 90 of 1,000, 01:30 so far, 15:10 to go, loss 2",
        "step 100 of 1,000, 01:40 so far, 15:00 to go, loss 2",
    ]


def test_what_takes_long_is_told_again_and_again(monkeypatch, capsys):
    monkeypatch.setitem(progress.SECONDS_A_REFRESH, False, 0.05)
    with Progress(done=0, total=3) as shown, shown.busy("building the graph"):
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 6
    assert set(lines) == {"step 0 of 3, 00:00 so far, building the graph"}


def test_nothing_is_told_where_nothing_is_done(capsys):
    with Progress(done=7, total=3):
        pass
    assert capsys.readouterr().err == ""
