"""pipemesh trains layer stacks that are too big or too slow for one device.

Importing it loads neither TensorFlow nor lingvo. The pure packages `pipemesh.partition`,
`pipemesh.schedule` and `pipemesh.mesh` work without them; `pipemesh.layers` loads them.
`decode` and `score` use a trained model in a separate process.

Example:
    >>> from pipemesh.partition import partition
    >>> partition([3, 1, 1, 3], num_stages=2).boundaries
    (0, 2, 4)
"""

from pipemesh.commands.from_python import DecodedText, TextScore, decode, score

__all__ = ["DecodedText", "TextScore", "decode", "score"]

__version__ = "0.1.0.dev0"
