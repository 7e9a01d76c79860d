"""What a process checks before it joins others, and how one command is started in several."""

import os
import pathlib
import subprocess
import sys

import pytest

from pipemesh.errors import DeviceError
from pipemesh.hosts import Cluster, peers, silence, together

ROOT = str(pathlib.Path(__file__).parents[2])


def test_others_are_let_in_only_if_it_is_said():
    with pytest.raises(DeviceError, match=r"say that they may: --listen=192\.0\.2\.1"):
        peers.connect(Cluster(("192.0.2.1:2222",)), 0)


def test_a_process_that_comes_from_another_address_says_so(monkeypatch, capfd):
    """The others drop its packets without an answer."""
    sources = {"10.0.0.2:1": "10.0.0.1:5", "10.0.0.3:1": "10.0.0.9:5", "127.0.0.1:1": "127.0.0.1:5"}
    monkeypatch.setattr(peers, "own_address", sources.get)
    addresses = ["10.0.0.1:1", *sources]
    peers._say_sources(addresses, 0, None)
    peers._say_sources(addresses, 0, "0.0.0.0")
    assert not capfd.readouterr().err
    peers._say_sources(addresses, 0, "10.0.0.1")
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert "process 0 (10.0.0.1:1) comes to process 2 (10.0.0.3:1) from 10.0.0.9" in told


def test_there_is_an_address_for_each():
    with pytest.raises(DeviceError, match="this is process 2, but there are 2 addresses"):
        peers.connect(Cluster(("127.0.0.1:2222", "127.0.0.1:2223")), 2)


def test_a_port_that_somebody_has_is_an_error():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DeviceError, match="give this process another port"):
            peers.connect(Cluster((f"127.0.0.1:{port}",)), 0)


def test_who_is_silent_can_speak_again(capsys):
    silence.be_silent()
    try:
        print("unheard")
        assert silence.is_silent()
    finally:
        silence.speak()
    print("heard")
    assert not silence.is_silent()
    assert capsys.readouterr().out == "heard\n"


def program(text):
    return [sys.executable, "-c", text]


def test_every_process_knows_its_number(tmp_path):
    code = "import json, os, sys; i = json.loads(os.environ['TF_CONFIG'])['task']['index']; "
    assert together.run(program(f"{code}open('{tmp_path}/' + str(i), 'w')"), 3) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


def test_one_that_fails_ends_all(monkeypatch):
    monkeypatch.setattr(together, "_SECONDS_TO_END", 0.5)
    code = "import json, os, sys, time; i = json.loads(os.environ['TF_CONFIG'])['task']['index']; "
    assert together.run(program(f"{code}sys.exit(7) if i else time.sleep(9)"), 2) == 7


def test_one_that_is_killed_is_started_again(tmp_path):
    code = (
        f"import os, signal; path = '{tmp_path}/' + str(os.getpid()); open(path, 'w');"
        f" os.kill(os.getpid(), signal.SIGKILL) if len(os.listdir('{tmp_path}')) == 1 else None"
    )
    assert together.run(program(code), 1) == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_a_flag_that_names_no_process_is_an_error():
    command = [sys.executable, "-m", "models.one_billion_word.train", "--lowering=simd"]
    command += ["--mesh_shape=layers:1;data:2", "--layout=batch:data"]
    done = subprocess.run(
        [*command, "--cluster=127.0.0.1:2222", "--process=3", "--logdir=/nonexistent"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "--process=3: there are 1 addresses" in done.stderr


# Ends by a signal so many times, each time after a moment, and then well.
KILLED = 'echo >> "$0"; if [ $(wc -l < "$0") -gt {times} ]; then exit 0; fi; sleep 0.15; kill -9 $$'


def killed(times, path):
    return ["sh", "-c", KILLED.format(times=times), str(path)]


def test_one_that_is_killed_again_and_again_soon_after_its_start_is_given_up(tmp_path, capfd):
    assert together.run(killed(9, tmp_path / "starts"), 1) == 128 + 9
    assert len((tmp_path / "starts").read_text()) == 5
    said = capfd.readouterr().err
    assert said.count("it is started again") == 4
    assert "process 0 has ended (signal SIGKILL) for the last time" in said


def test_one_that_has_run_for_a_while_is_started_again_however_often(tmp_path, monkeypatch):
    monkeypatch.setattr(together, "_SOON", 0.01)
    assert together.run(killed(7, tmp_path / "starts"), 1) == 0
    assert len((tmp_path / "starts").read_text()) == 8


def test_one_that_finishes_steps_is_started_again_however_often(tmp_path):
    """Where a restart takes minutes, five of them in a row are no reason to give up."""
    words = killed(7, tmp_path / "starts")
    words[2] = words[2].replace("sleep", 'echo 1 > "$PIPEMESH_STEPS"; sleep')
    assert together.run(words, 1) == 0
    assert len((tmp_path / "starts").read_text()) == 8


# The first one, the second one and a spare, of which each does what is said.
OF_THREE = (
    "import json, os, signal, sys, time; task = json.loads(os.environ['TF_CONFIG'])['task'];"
    " number = 2 if task['type'] == 'spare' else task['index']; "
)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "for the last time"),
        ("time.sleep(60)", "and process 1 did not; killed"),
    ],
)
def test_with_spares_the_others_end_without_one_that_is_lost(second, said, monkeypatch, capfd):
    monkeypatch.setattr(together, "_SECONDS_TO_END", 0.5)
    monkeypatch.setattr(together, "_MOST_STARTS", 2)
    code = f"{OF_THREE}\nif number == 1: {second}\nelse: time.sleep(1.0)"
    assert together.run(program(code), 2, spares=1) == 0
    assert said in capfd.readouterr().err


def test_with_spares_too_one_that_fails_ends_all(monkeypatch):
    monkeypatch.setattr(together, "_SECONDS_TO_END", 0.5)
    code = f"{OF_THREE}\nif number == 2: sys.exit(7)\nelse: time.sleep(9)"
    assert together.run(program(code), 2, spares=1) == 7


@pytest.mark.parametrize(
    ("program", "words", "told"),
    [
        ("train", ["--process=0", "--client_address=a:1"], "--client_address is for one process"),
        ("train", ["--process=2", "--spares=127.0.0.1:2223"], "--process=2: there are 2 addresses"),
        ("evaluate", ["--process=0", "--elastic"], "--elastic is for a training, which goes on"),
        (
            "evaluate",
            ["--process=1", "--spares=127.0.0.1:2223"],
            "--spares is for a training, which goes on",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_errors(program, words, told, tmp_path):
    command = [sys.executable, "-m", f"models.one_billion_word.{program}", "--lowering=simd"]
    done = subprocess.run(
        [*command, "--mesh_shape=layers:1", "--cluster=127.0.0.1:2222", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert told in done.stderr
