"""Example models. Importing the package loads neither TensorFlow nor lingvo, but prepares both."""

from pipemesh.commands import process

process.import_quietly()
