"""Hosts in network namespaces of their own, joined by a bridge that can be cut."""

import contextlib
import shutil
import subprocess

from tests.warm import warm

NEEDED = ("ip", "nsenter", "unshare")
# Does what Python does in the network namespace whose path is the first argument.
ENTER = """
import ctypes, os, sys
from tests.warm.server import run
assert not ctypes.CDLL(None).setns(os.open(sys.argv[1], os.O_RDONLY), 0)
run({}, sys.argv[2:], os.getcwd(), dict(os.environ))
"""


def why_not():
    """Why this system has none; "" if it has."""
    if missing := [name for name in NEEDED if not shutil.which(name)]:
        return f"{', '.join(missing)} is not installed"
    done = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"network namespaces are not permitted: {done.stderr.strip()}"
    try:
        with network(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be joined: {error.stderr.strip()}"


class Network:
    """Hosts that reach each other. The host 0 has the bridge.

    They exist as long as a process of each: nothing of them is left on the machine.
    """

    def __init__(self, number):
        self._there = [
            subprocess.Popen(["unshare", "-n", "sh", "-c", "echo; exec sleep 10000"], stdout=-1)
            for _ in range(number + 1)
        ]
        for each in self._there:
            each.stdout.readline()

    def join(self):
        self.ip(0, "link add bridge type bridge")
        self.ip(0, f"addr add {self.address(0)}/24 dev bridge")
        self.ip(0, "link set bridge up")
        self.ip(0, "link set lo up")
        for host, process in enumerate(self._there[1:], 1):
            self.ip(0, f"link add to{host} type veth peer name eth netns {process.pid}")
            self.ip(0, f"link set to{host} master bridge up")
            self.ip(host, f"addr add {self.address(host)}/24 dev eth")
            self.ip(host, "link set eth up")
            self.ip(host, "link set lo up")

    def address(self, host):
        return f"10.77.0.{1 + host}"

    def on(self, host, *command):
        """A command that runs on a host."""
        return ["nsenter", "-t", str(self._there[host].pid), "-n", *command]

    def warm(self, host, *arguments):
        """The command that does what Python does with these arguments on a host; see `warm`."""
        return warm("-c", ENTER, f"/proc/{self._there[host].pid}/ns/net", *arguments)

    def ip(self, host, words):
        command = self.on(host, "ip", *words.split())
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def link(self, one, other, addresses):
        """Gives two hosts a network of their own, by interfaces called `own`."""
        pid = self._there[other].pid
        self.ip(one, f"link add own type veth peer name own netns {pid}")
        for host, address in zip((one, other), addresses, strict=True):
            self.ip(host, f"addr add {address}/24 dev own")
            self.ip(host, "link set own up")

    def cut(self, host):
        """Cuts a host off: what is sent to it, or by it, is gone without a word."""
        self.ip(0, f"link set to{host} down")

    def mend(self, host):
        self.ip(0, f"link set to{host} up")

    def part(self, one, other):
        """Lets nothing go between two hosts, which others still reach."""
        for host, peer in ((one, other), (other, one)):
            nobody = "02:00:00:00:00:99"
            self.ip(
                host, f"neigh replace {self.address(peer)} lladdr {nobody} dev eth nud permanent"
            )

    def rejoin(self, one, other):
        for host, peer in ((one, other), (other, one)):
            self.ip(host, f"neigh del {self.address(peer)} dev eth")

    def limit(self, host, rate):
        """Limits what a host sends and gets to a rate such as `1mbit`; None for no limit."""
        for place, device in ((host, "eth"), (0, f"to{host}")):
            change = f"replace dev {device} root tbf rate {rate} burst 5kb latency 1s"
            words = change.split() if rate else f"del dev {device} root".split()
            subprocess.run(self.on(place, "tc", "qdisc", *words), check=True, capture_output=True)

    def end(self):
        for each in self._there:
            each.kill()
            each.communicate()


@contextlib.contextmanager
def network(number):
    """A network of host 0 and so many more."""
    found = Network(number)
    try:
        found.join()
        yield found
    finally:
        found.end()
