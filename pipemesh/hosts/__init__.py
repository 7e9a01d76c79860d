"""Several hosts: workers that offer their devices, one client that drives and watches them.

TensorFlow's own runtime carries it. Importing this room loads no TensorFlow.

Example:
    >>> from pipemesh.hosts import Cluster
    >>> Cluster.from_text("a:2222,b:2222").workers
    ('a:2222', 'b:2222')
"""

from pipemesh.hosts.cluster import Cluster

__all__ = ["Cluster"]
