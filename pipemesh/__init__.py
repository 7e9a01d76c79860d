"""pipemesh trains layer stacks that are too big or too slow for one device.

Importing it loads neither TensorFlow nor lingvo: the pure rooms `pipemesh.partition`,
`pipemesh.schedule` and `pipemesh.mesh` can be used alone, and `pipemesh.layers` loads the rest.
`decode` and `score` use what was trained in a process of its own.

Example:
    >>> from pipemesh.partition import partition
    >>> partition([3, 1, 1, 3], num_stages=2).boundaries
    (0, 2, 4)
"""

from pipemesh.commands.from_python import DecodedText, TextScore, decode, score

__all__ = ["DecodedText", "TextScore", "decode", "score"]

__version__ = "0.1.0.dev0"
