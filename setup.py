"""Names the packages of the wheel: `pipemesh`, and the folder `models` as `pipemesh_models`.

Many projects have a folder `models` of their own, which would hide a package of that name.
"""

from setuptools import find_packages, setup

examples = [
    "pipemesh_models" + name.removeprefix("models")
    for name in find_packages(include=["models", "models.*"])
]
setup(
    packages=[*find_packages(include=["pipemesh", "pipemesh.*"]), *examples],
    package_dir={"pipemesh_models": "models"},
)
