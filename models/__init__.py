"""Example models; importing the package prepares TensorFlow and lingvo without loading them."""

from pipemesh.commands import process

process.import_quietly()
