"""The environment with torch of benchmarks, without its packages."""

import pathlib
import subprocess
import venv


def test_an_environment_of_other_packages_is_made_anew(modules_of, monkeypatch, tmp_path):
    (environment,) = modules_of(".", "shared.torch_environment")
    assert [name.partition(">")[0] for name in environment.PEFT] == ["transformers", "peft"]
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "torch_environment.py"))
    monkeypatch.setattr(
        venv, "create", lambda folder, **_: pathlib.Path(folder).mkdir(exist_ok=True)
    )
    installed = []
    monkeypatch.setattr(subprocess, "run", lambda words, check: installed.append(words[5:]))
    for packages in (["peft>=1"], ["peft>=1"], ["peft>=2"]):
        environment.torch_python(None, *packages)
    torch = [environment.TORCH, "numpy"]
    assert installed == [[*torch, "peft>=1"], [*torch, "peft>=2"]]
