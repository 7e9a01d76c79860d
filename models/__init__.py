"""Example models. Importing the package loads neither TensorFlow nor lingvo, but prepares both."""

from pipemesh.training.command import quiet

quiet.install()
