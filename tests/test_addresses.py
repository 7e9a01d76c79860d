"""Addresses of processes, and those of this machine."""

import socket

import pytest

from pipemesh.addresses import (
    check_addresses,
    check_free,
    host_and_port,
    own_address,
    own_ip,
)
from pipemesh.errors import DeviceError


@pytest.mark.parametrize("address", ["a", "a:", ":1", "a:0", "a:65536", "a:b", "a b:1", 5, None])
def test_an_address_without_host_or_port_is_an_error(address):
    with pytest.raises(DeviceError, match="is not host:port"):
        host_and_port(address)


def test_an_ipv6_address_needs_brackets():
    assert host_and_port("[::1]:3903") == ("::1", 3903)
    with pytest.raises(DeviceError, match=r"'::1:3903' is not host:port; write .*needs brackets"):
        host_and_port("::1:3903")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a:2222", "a:2222"),
        ("a:2222", "a:02222"),
        ("A:1", "a:1"),
        ("[::1]:1", "[0::1]:1"),
        ("1.2.3.4:1", "[::ffff:1.2.3.4]:1"),
    ],
)
def test_one_address_may_not_be_given_twice(one, other):
    with pytest.raises(DeviceError, match="occurs twice; each process has its own"):
        check_addresses([one, other])


def test_the_own_address_is_that_of_the_way_to_the_other():
    host, _, port = own_address("127.0.0.1:2222").rpartition(":")
    assert host == "127.0.0.1"
    assert 0 < int(port) < 65536


def test_an_unknown_host_is_named():
    with pytest.raises(DeviceError, match=r"the host of 'no-such-host.invalid:1' is unknown"):
        own_address("no-such-host.invalid:1")


def test_an_address_of_another_machine_is_an_error():
    assert own_ip("localhost", "") in ("127.0.0.1", "::1")
    wanted = (
        r"--listen=x: this machine does not have the address 192\.0\.2\.77; give one that it has"
    )
    with pytest.raises(DeviceError, match=wanted):
        own_ip("192.0.2.77", "--listen=x")


def test_a_port_in_use_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(DeviceError, match="p: Address already in use; give another"):
            check_free(taken.getsockname()[1], "p", "give another")
