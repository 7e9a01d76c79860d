"""Several hosts: workers that offer their devices, and one client that drives and watches them.

They communicate over TensorFlow's runtime. Importing this package loads no TensorFlow.

Example:
    >>> from pipemesh.hosts import Cluster
    >>> Cluster.from_text("a:2222,b:2222").workers
    ('a:2222', 'b:2222')
"""

from pipemesh.hosts.cluster import Cluster

__all__ = ["Cluster"]
