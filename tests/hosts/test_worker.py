"""The command `pipemesh worker`."""

import os
import signal
import socket

import pytest

from pipemesh.commands.main import main
from pipemesh.hosts import Cluster, health, worker
from pipemesh.hosts.health import Health, ask
from tests.hosts.workers import COMMAND, address_of, start


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--port=70000"], "--port=70000: it must be 0 or more, and below 65536"),
        (["--cpu_devices=0"], "--cpu_devices=0: it must be at least 1"),
        (["--listen=192.0.2.77"], "this machine does not have the address 192.0.2.77; give one"),
        (["--listen=no-such-host.invalid"], "--listen=no-such-host.invalid is no address"),
        (["--port={taken}"], "--port={taken}: Address already in use; give another"),
    ],
)
def test_invalid_workers_are_errors_at_once(words, told, capsys, monkeypatch):
    # TensorFlow takes seconds to load.
    monkeypatch.setattr(worker, "_serve", None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert main(["worker", *(word.format(taken=taken) for word in words)]) == 2
    assert told.format(taken=taken) in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)]
)
def test_a_worker_answers_unless_stopped_and_ends_by_a_signal(number):
    worker = start("--cpu_devices=3", command=COMMAND)
    try:
        address = address_of(worker)
        assert address.startswith("127.0.0.1:")
        (health,) = ask([address], 10)
        assert health.devices == ("CPU:0", "CPU:1", "CPU:2")
        assert health.start
        worker.send_signal(signal.SIGSTOP)
        # Until one of its threads has taken the signal, the others go on and answer.
        os.waitpid(worker.pid, os.WUNTRACED)
        assert ask([address], 1.0)[0].trouble.startswith("has not answered for ")
        worker.send_signal(signal.SIGCONT)
        assert ask([address], 10) == [health]
        worker.send_signal(number)
        out, _ = worker.communicate(timeout=20)
        assert (worker.returncode, out) == (0, "")
        assert "refused" in ask([address], 5)[0].trouble
    finally:
        worker.kill()
        worker.communicate()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_worker_of_mpi_ends_with_its_file(tmp_path, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "1")
    worker = start(f"--announce={tmp_path}")
    monkeypatch.delenv("PMI_RANK")
    try:
        assert Cluster.from_text(f"mpi:{tmp_path}").workers == (address_of(worker),)
        (tmp_path / "worker-0-of-1").unlink()
        worker.communicate(timeout=30)
        assert worker.returncode == 0
    finally:
        worker.kill()
        worker.communicate()


def test_a_worker_on_a_busy_machine_asks_itself_again(monkeypatch, capfd):
    """gRPC gives up a connection that takes 0.1 s; the worker took that for no answer in 30."""
    answers = [Health(trouble="has not answered for 0 s"), Health(("CPU:0",), 7)]
    monkeypatch.setattr(health, "ask", lambda *_: [answers.pop(0)])
    worker._announce("127.0.0.1:2222", "127.0.0.1")
    told = "only programs on this machine can connect (--listen=ADDRESS lets others); devices CPU:0"
    assert told in capfd.readouterr().err
