"""Every operation as the program of one core equals plain TensorFlow on every core.

Generated from the registry and `tests/lowering/cases`, on up to 8 logical CPU devices that talk to
each other by TensorFlow's collectives. Only the primitives differ from placement, so a case runs
under the few layouts that split most dims: without a graph, each core in its thread, on a small
mesh, each third one also on the mesh of axes of two sizes; and each second one as a graph. Cases
that are marked `thin`, which share their code with others, are `exhaustive`, as is the rest. As
graphs, `test_operations_tpu.py` builds all of them.
"""

import json
import subprocess
import tempfile
import threading

import pytest

from tests.lowering.cases import ALL
from tests.lowering.cases.case import GRAPH_MESH, not_thin, sampled
from tests.warm import warm

SECONDS_WITHOUT_A_RESULT = 60


class Server:
    """Runs one case after the other in a process, and in a new one after it hung or died."""

    def __init__(self):
        self.process = None

    def ask(self, *case):
        """The differences of a case."""
        if self.process is None:
            self.errors = tempfile.TemporaryFile("w+")
            self.process = subprocess.Popen(
                warm("-m", "tests.conformance.simd_process"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
            )
            # It says when TensorFlow is loaded, which takes minutes on a busy machine.
            self.process.stdout.readline()
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        watch = threading.Timer(SECONDS_WITHOUT_A_RESULT, self.process.kill)
        watch.start()
        line = self.process.stdout.readline()
        watch.cancel()
        if line:
            return json.loads(line)
        self.errors.seek(0)
        errors = self.errors.read()
        self.close()
        return [f"the process hung or died: {errors[-2000:]}"]

    def close(self):
        """Ends the process."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.errors.close()
            self.process = None


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


@pytest.mark.parametrize(
    ("mesh_text", "name"), sampled(ALL, "a:2;b:4", shift=2, every=3, thin=False)
)
def test_eagerly_results_and_gradients_equal_tensorflows(server, mesh_text, name):
    assert not server.ask(mesh_text, name, False)


@pytest.mark.parametrize("name", not_thin(ALL, every=2))
def test_in_a_graph_results_and_gradients_equal_tensorflows(server, name):
    assert not server.ask(GRAPH_MESH, name, True)


@pytest.mark.slow
def test_next_case_runs_after_one_that_kills_the_process(server):
    (found,) = server.ask("a:2", "no operation", False)
    assert found.startswith("the process hung or died: ") and "KeyError: 'no operation'" in found
    assert not server.ask("a:2", next(iter(ALL)), False)
