"""Connections between processes, and the addresses that may connect to their servers."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2

# These are mostly private; TensorFlow's version is pinned to 2.21.
from tensorflow.python import _pywrap_tfe, pywrap_tfe
from tensorflow.python.eager import context, core
from tensorflow.python.framework import constant_op

from pipemesh.addresses import (
    LOOPBACK_INTERFACE,
    check_addresses,
    check_free,
    host_and_port,
    interfaces_by_address,
    ips_of,
    is_loopback,
    own_address,
    plain_ip,
    use_no_proxy,
)
from pipemesh.backend.devices import CLIENT, eager_context, is_client
from pipemesh.errors import DeviceError

# From asm-generic/socket.h; Python has no name for it.
_SO_ATTACH_FILTER = 26
# Offsets from this one on count from the start of the IP header.
_NET = -0x100000
# The virtual offset of the number of the receiving interface.
_INTERFACE = -0x1000 + 8
_LOAD_BYTE, _LOAD_WORD = 0x30, 0x20
_RIGHT, _AND, _IF_EQUAL, _RETURN = 0x74, 0x54, 0x15, 0x06
_ALL, _NOTHING = 0xFFFFFFFF, 0
_LOOPBACK = ("127.0.0.0/8", "::1/128")


def keep_to(port: int, addresses: Sequence[str], peers: bool = False) -> None:
    """Drops connections to a port of this process from, or to, other addresses than these."""
    # With `peers`, the addresses are those of clients that may connect. Otherwise they are
    # addresses of this machine: others may connect through the network interface of such an
    # address, and so may this machine itself. A loopback address stands for all loopback addresses.
    allowed = networks(addresses)
    interfaces = () if peers else interfaces_of(addresses)
    code = program(allowed, peers, interfaces)
    buffer = ctypes.create_string_buffer(code)
    value = struct.pack("HL", len(code) // 8, ctypes.addressof(buffer))
    is_listening = False
    for sock in _sockets_of(port):
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            is_listening = True
            try:
                sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, value)
            except OSError as error:
                raise DeviceError(
                    f"this system cannot restrict port {port} to {', '.join(addresses)} "
                    f"({error.strerror})"
                ) from error
            # Drop pending connections; allowed clients connect again.
            while select.select([sock], [], [], 0)[0]:
                try:
                    sock.accept()[0].close()
                except BlockingIOError:
                    break
    if not is_listening:
        raise DeviceError(f"this process does not listen on port {port}")
    for sock in _sockets_of(port):
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            with contextlib.suppress(OSError):
                address = sock.getpeername()[0] if peers else sock.getsockname()[0]
                # The interface of an earlier connection is unknown.
                is_known = peers or is_loopback(address) or not interfaces
                if not (is_known and is_allowed(address, allowed)):
                    sock.shutdown(socket.SHUT_RDWR)


def networks(
    addresses: Sequence[str],
) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Returns the network of each address; a loopback stands for all loopback addresses."""
    texts: list[str] = []
    for address in addresses:
        mapped = plain_ip(address)
        texts += _LOOPBACK if mapped.is_loopback else [str(mapped)]
    return [ipaddress.ip_network(text) for text in dict.fromkeys(texts)]


def is_allowed(
    address: str, allowed: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]
) -> bool:
    """Returns whether an address, mapped into IPv6 or not, lies in one of the networks."""
    return any(plain_ip(address) in network for network in allowed)


def interfaces_of(addresses: Sequence[str]) -> tuple[int, ...]:
    """Returns the numbers of the interfaces that receive packets for addresses of this machine."""
    # Empty, which allows any interface, if an address belongs to no network: it is on the loopback
    # interface, but no loopback address.
    by_address = interfaces_by_address()
    others = [str(address) for address in map(plain_ip, addresses) if not address.is_loopback]
    numbers = {by_address.get(address, LOOPBACK_INTERFACE) for address in others}
    return () if LOOPBACK_INTERFACE in numbers else tuple(sorted({LOOPBACK_INTERFACE, *numbers}))


def program(
    allowed: Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network],
    peers: bool,
    interfaces: Sequence[int] = (),
) -> bytes:
    """Returns the filter's code, which checks sources (`peers`) or destinations of packets."""

    def code(version: int, offset: int) -> list[tuple[int, int, int, int]]:
        matches = [_match(n, _NET + offset, interfaces) for n in allowed if n.version == version]
        return [line for lines in matches for line in lines] + [(_RETURN, 0, 0, _NOTHING)]

    four_lines = code(4, 12 if peers else 16)
    six_lines = code(6, 8 if peers else 24)
    # A conditional jump is short, so a second, long one skips the lines for IPv4.
    lines = [
        (_LOAD_BYTE, 0, 0, _NET),
        (_RIGHT, 0, 0, 4),
        (_IF_EQUAL, 1, 0, 4),
        (0x05, 0, 0, len(four_lines)),
        *four_lines,
        *six_lines,
    ]
    return b"".join(struct.pack("HBBI", code, yes, no, k & _ALL) for code, yes, no, k in lines)


def _match(
    network: ipaddress.IPv4Network | ipaddress.IPv6Network, offset: int, interfaces: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """Returns code that lets packets of one network through."""
    passes = [(_RETURN, 0, 0, _ALL)]
    if interfaces:
        last = len(interfaces) - 1
        passes = [
            (_LOAD_WORD, 0, 0, _INTERFACE),
            *((_IF_EQUAL, last - i + 1, 0, number) for i, number in enumerate(interfaces)),
            (_RETURN, 0, 0, _NOTHING),
            *passes,
        ]
    words = struct.unpack(f"!{network.max_prefixlen // 32}I", network.network_address.packed)
    masks = struct.unpack(f"!{network.max_prefixlen // 32}I", network.netmask.packed)
    lines: list[tuple[int, int, int, int]] = []
    for i, (word, mask) in enumerate(zip(words, masks, strict=True)):
        # The remaining lines of this network: three per word, and the last ones.
        left = 3 * (len(words) - 1 - i) + len(passes)
        lines += [
            (_LOAD_WORD, 0, 0, offset + 4 * i),
            (_AND, 0, 0, mask),
            (_IF_EQUAL, 0, left, word),
        ]
    return [*lines, *passes]


def _sockets_of(port: int) -> Iterator[socket.socket]:
    """Yields copies of this process's sockets on a port, including those that C++ code opened."""
    for number in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(number))
        except OSError:
            continue
        try:
            sock = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with sock, contextlib.suppress(OSError):
            name = sock.getsockname()
            if sock.family in (socket.AF_INET, socket.AF_INET6) and name[1] == port:
                yield sock


WORKER = "worker"
# The task that forms the groups of collective operations; both sides have to know it.
COLLECTIVE_LEADER = f"/job:{WORKER}/replica:0/task:0"
OWN_HOST = f"/job:{CLIENT}/replica:0/task:0/device:CPU:0"
# A worker frees a client's resources after so many seconds without contact.
_KEEP_ALIVE_SECONDS = 60


def connect_workers(workers: Sequence[str], client: str | None = None) -> list[str]:
    """Makes the devices of other processes devices of this one, before TensorFlow starts; returns
    their names. Workers fetch tensors from each other and from this process, so each must reach all
    addresses; other addresses cannot connect here.
    """
    check_addresses([*workers, *([client] if client else [])])
    if client:
        remedy = "give this process another port, or none"
        check_free(host_and_port(client)[1], f"client address {client!r}", remedy)
    eager = eager_context()
    if eager._initialized:
        raise DeviceError(
            "TensorFlow has already started; connect workers before the first operation"
        )
    client = client or own_address(workers[0])
    use_no_proxy()
    cluster = tf.train.ClusterSpec({WORKER: list(workers), CLIENT: [client]})
    context._KEEP_ALIVE_SECS = _KEEP_ALIVE_SECONDS
    # Without operations to merge: TensorFlow would look through all graphs for some.
    eager.configure_collective_ops(COLLECTIVE_LEADER, scoped_allocator_enabled_ops=())
    eager.set_server_def(
        tensorflow_server_pb2.ServerDef(
            cluster=cluster.as_cluster_def(),
            job_name=CLIENT,
            task_index=0,
            protocol="grpc",
            default_session_config=eager.config,
        )
    )
    eager.ensure_initialized()
    _release_lock()
    keep_to(host_and_port(client)[1], [*ips_of(workers), "127.0.0.1"], peers=True)
    return [device for devices in worker_devices("") for device in devices]


def _release_lock() -> None:
    """Lets threads of Python run while TensorFlow sends functions and constants to workers."""
    # It waits for each worker with Python's lock held: no thread could notice a silent one.
    library = ctypes.CDLL(_pywrap_tfe.__file__)
    library.TF_NewStatus.restype = ctypes.c_void_p
    library.TF_Message.restype = ctypes.c_char_p

    def without_lock(name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            status = ctypes.c_void_p(library.TF_NewStatus())
            try:
                # ctypes releases the lock.
                library[name](*map(_native, arguments), status)
                if code := library.TF_GetCode(status):
                    message = library.TF_Message(status).decode(errors="replace")
                    raise tf.compat.v1.errors.exception_type_from_error_code(code)(
                        None, None, message
                    )
            finally:
                library.TF_DeleteStatus(status)

        return call

    for name in ("AddFunction", "AddFunctionDef", "RemoveFunction"):
        setattr(pywrap_tfe, f"TFE_Context{name}", without_lock(f"TFE_Context{name}"))
    # As functions, operations of this process would be sent to all workers.
    without_lock("TFE_ContextSetRunEagerOpAsFunction")(eager_context()._handle, 0)
    convert, execute = constant_op.convert_to_eager_tensor, pywrap_tfe.TFE_Py_FastPathExecute

    def convert_here_first(value: Any, ctx: context.Context, dtype: Any = None) -> Any:
        if isinstance(value, tf.Tensor) or not _is_on_worker(ctx):
            return convert(value, ctx, dtype)
        with ctx.device(OWN_HOST):
            tensor = convert(value, ctx, dtype)
        # TensorFlow leaves these in this process.
        return tensor if tensor.dtype == tf.int32 else constant_op._eager_identity(tensor, ctx)

    def execute_here(ctx: context.Context, *arguments: Any) -> Any:
        if _is_on_worker(ctx):
            # Lets the caller convert numbers as above.
            raise core._FallbackException
        return execute(ctx, *arguments)

    constant_op.convert_to_eager_tensor = convert_here_first
    pywrap_tfe.TFE_Py_FastPathExecute = execute_here


def _native(argument: Any) -> Any:
    """Converts an argument for C; an object of pybind11 has its pointer after its head."""
    if isinstance(argument, str):
        return argument.encode()
    if isinstance(argument, int):
        return ctypes.c_size_t(argument)
    if isinstance(argument, bytes):
        return argument
    return ctypes.c_void_p.from_address(id(argument) + object.__basicsize__)


def _is_on_worker(ctx: context.Context) -> bool:
    return f"/job:{WORKER}/" in (ctx.device_name or "")


def check_way_back(task: int) -> None:
    """Checks that a worker can fetch a tensor from this process, as it does in each step."""
    definition = eager_context().get_server_def()
    assert definition is not None
    jobs = {job.name: job.tasks for job in definition.cluster.job}
    client, worker = jobs[CLIENT][0], f"worker {task} ({jobs[WORKER][task]})"

    def fetch(x: tf.Tensor) -> tf.Tensor:
        with tf.device(f"/job:{WORKER}/replica:0/task:{task}/device:CPU:0"):
            return x + 1.0

    try:
        with context.eager_mode(), tf.device(OWN_HOST):
            tf.function(fetch, autograph=False)(tf.constant(1.0)).numpy()
    except tf.errors.UnavailableError as error:
        if f"target /job:{CLIENT}/" not in error.message:
            raise
        allowed = ", ".join(ips_of(list(jobs[WORKER].values())))
        # Without the cause, which looks like a broken connection that a retry could restore.
        raise DeviceError(
            f"{worker} does not reach this process at {client}, which lets in {allowed} and "
            "this machine; the worker may come from another of its addresses, which `ip route get "
            f"{host_and_port(client)[0]}` prints on its host as `src`: name it by that one in "
            "--cluster, or set --client_address"
        ) from None


def worker_devices(kind: str) -> list[list[str]]:
    """Returns the devices of each worker, of one kind or all (`""`); empty without workers."""
    if not is_client():
        return []
    definition = eager_context().get_server_def()
    assert definition is not None
    tasks = next(len(job.tasks) for job in definition.cluster.job if job.name == WORKER)
    devices: list[list[str]] = [[] for _ in range(tasks)]
    for device in tf.config.list_logical_devices(kind or None):
        spec = tf.DeviceSpec.from_string(device.name)
        if spec.job == WORKER and spec.task is not None:
            devices[spec.task].append(device.name)
    return devices


def task_of(device: str) -> int | None:
    """Returns the number of the worker that a device belongs to, None for this process."""
    if not is_client():
        return None
    spec = tf.DeviceSpec.from_string(device)
    return spec.task if spec.job == WORKER else None


def own_host() -> str:
    """Returns this process's CPU, by a name that is also valid if there are workers."""
    return OWN_HOST if is_client() else "CPU:0"


def host_of(device: str) -> str:
    """Returns the CPU of the process that a device belongs to."""
    if task_of(device) is None:
        return own_host()
    spec = tf.DeviceSpec.from_string(device)
    return spec.replace(device_type="CPU", device_index=0).to_string()
