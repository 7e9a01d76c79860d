"""What a process checks before it joins others, and how one command is started in several."""

import subprocess
import sys

import pytest

from pipemesh.errors import DeviceError
from pipemesh.hosts import Cluster, peers, silence, together


def test_others_are_let_in_only_if_it_is_said():
    with pytest.raises(DeviceError, match=r"say that they may: --listen=192\.0\.2\.1"):
        peers.connect(Cluster(("192.0.2.1:2222",)), 0)


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


def test_one_that_fails_ends_all():
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
