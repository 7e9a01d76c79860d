"""The question whether a worker is there, and its answers."""

import random

import grpc
import pytest

from pipemesh.hosts import health
from pipemesh.hosts.health import Health, ask
from tests.hosts.workers import serving

FOREIGN = "is no worker: a server of another kind answers there"


class Answer:
    def __init__(self, content):
        self.content = content

    def result(self):
        return self.content


def test_no_answer_is_so_strange_that_it_is_an_error():
    chance = random.Random(1)
    device = bytes([10, 5]) + b"CPU:0" + bytes([0x31]) + bytes(range(1, 9))
    well_formed = bytes([10, len(device)]) + device
    assert health._answer(Answer(well_formed), 0.0).devices
    for _ in range(3000):
        content = bytearray(well_formed if chance.random() < 0.5 else chance.randbytes(30))
        for _ in range(chance.randint(0, 3)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        found = health._answer(Answer(bytes(content[: chance.randint(0, 30)])), 0.0)
        assert found.trouble or (found.devices and found.start)


@pytest.mark.parametrize("method", [health.QUESTION, "/another/one"])
def test_a_server_of_another_kind_is_no_worker(method):
    answers = {method: lambda: b"\x0a\xff"}
    with serving(answers.get) as address:
        assert ask([address], 10.0) == [Health(trouble=FOREIGN)]


def test_a_worker_that_does_not_answer_has_not_since_it_did():
    asker = health.Asker(["127.0.0.1:9"])
    asker._since[0] -= 30

    class Late:
        def result(self):
            raise grpc.RpcError

        def details(self):
            return "connect timed out"

        def code(self):
            return None

    assert health._answer(Late(), asker._since[0]).trouble == "has not answered for 30 s"
    asker.close()
