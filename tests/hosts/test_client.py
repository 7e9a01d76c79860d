"""A client that begins again, or ends, whatever holds it back."""

import os
import signal
import subprocess
import sys

import pytest
import tensorflow as tf

from pipemesh.hosts import client
from tests.hosts.faults import until

# A program whose only worker is lost.
PROGRAM = """
import os, sys, time
from pipemesh.hosts import client, watch
if client.has_begun_again():
    open(sys.argv[1], "w").close()
    os._exit(0)
watched = watch.Watch({0: "127.0.0.1:9"}, [7], 0.3, client.begin_again)
watch.make_current(watched)
watched.start()
time.sleep(20)
"""
STANDARD_ERRORS = ["2>/dev/full", "2>&-", "2>&1 | true", "2>&1 | sleep 99"]
# Of the last one, a pipe that is full and that nobody reads.
FILL = "import os, select\nwhile select.select([], [2], [], 0)[1]: os.write(2, bytes(4096))"


@pytest.mark.slow
def test_a_lost_worker_is_noticed_without_standard_error(tmp_path):
    """The thread that watches died of an error of its own line, and the client waited for ever."""
    started = []
    for number, redirection in enumerate(STANDARD_ERRORS):
        fill = FILL if "sleep" in redirection else ""
        command = f'exec "$0" -c "$1" {tmp_path / str(number)} {redirection}'
        words = ["sh", "-c", command, sys.executable, f"{fill}{PROGRAM}"]
        started.append(subprocess.Popen(words, start_new_session=True))
    try:
        until(lambda: len(os.listdir(tmp_path)) == len(STANDARD_ERRORS), 60)
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_what_begins_again_leaves_no_temporary_files():
    def doubled(x):
        return x * 2 if x > 1 else x

    tf.autograph.to_graph(doubled)
    prefix = "__autograph_generated_file"
    written = [
        str(module.__file__) for name, module in sys.modules.items() if name.startswith(prefix)
    ]
    with client.scratch() as folder:
        paths = [folder, *written]
        assert any(map(os.path.exists, written))
        client._leave()
        assert not any(map(os.path.exists, paths))
