"""Shell commands of all documents run, in the order of each page and in an empty folder.

`PIPEMESH_DOC_STEPS` is how many steps each of them trains (3). `pytest --cases=all
tests/docs/test_commands.py` runs all pages; `make test` those that are quick, and the first page.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.commands.program import CODE
from tests.docs.pages import PAGES, ROOT, commands_of, name_of, programs_of
from tests.models.pretrained import small
from tests.warm import warm

STEPS = os.environ.get("PIPEMESH_DOC_STEPS", "3")
# What a command has that is not run here, and why.
NOT_RUN = {
    r"^make ": "CI runs it by itself",
    r"from transformers import": "needs torch; tests/models/pretrained/test_peers.py loads files",
    r"^(pip|python3 -m venv|source|apt-get|cmake|tar|git|hf) ": "installs or fetches something",
    r"and-cuda|list_physical_devices|--device_type=GPU": "needs a GPU",
    r"\b10\.8\.0\.|slurm|srun|kill %1": "needs several hosts",
    r"\.\.\.": "leaves something out",
    r"^pipemesh worker |--cluster=127": "needs several terminals",
    r"lingvo_trainer": "never ends; tests/layers/test_lingvo_trainer.py runs it",
    r"^pipemesh lm_eval ": "needs tasks; tests/models/pretrained/test_judging.py has some",
    r"lingvo_suite": "needs a checkout of lingvo",
    r"theirs/|runs/lm/|ours/": "needs a checkpoint of lingvo's trainer",
    r"FOLDER|path/to": "needs data or a checkout",
    r"^python benchmarks/": "tests/benchmarks/test_all.py runs the benchmarks",
    r"tuned\.Tuned|runs/tuned": "needs a class of the user's own",
}
# Pages that `make test` runs, without these commands, which are like others of the page.
SLOW = (
    r"^pipemesh launch |--mesh_shape='layers:2;data:2' |runs/half|--decay_steps|book\.txt|llama-8b"
    r"|--logdir=runs/model|decode --logdir=runs/lora"
)
QUICK = {
    "README.md",
    "docs/guides/finetune.md",
    "docs/guides/install.md",
    "docs/guides/many_devices.md",
    "docs/guides/partitioner.md",
    "docs/guides/schedules.md",
    "docs/guides/which_schedule.md",
    "pipemesh/partition/README.md",
    "pipemesh/schedule/README.md",
}
LANGUAGE_MODEL = "python -m models.one_billion_word.train --mesh_shape=layers:2 --logdir="
# Commands that other pages have, by what a page needs.
DOCUMENT = """echo '{"text": "the cat sat on the mat"}' | tee train.jsonl > heldout.jsonl"""
IMPORT = "pipemesh checkpoint import --from=gpt2/model.safetensors --logdir=runs/gpt2"
CATALOGUES = os.path.dirname(importlib.util.find_spec("plone.app.locales").origin)
BEFORE = {
    "models/pretrained/README.md": [DOCUMENT],
    "pipemesh/data/README.md": [DOCUMENT, IMPORT],
    "pipemesh/decoding/README.md": [
        f"{LANGUAGE_MODEL}runs/tiny",
        "printf 'The module\\nA function\\n' | tee prompts.txt > texts.txt",
    ],
    "models/translation/README.md": [
        f"python -m models.translation.catalogues --source=fr --target=es --to=pairs {CATALOGUES}",
        "cut -f1 pairs/train.tsv > train.fr; cut -f2 pairs/train.tsv > train.es",
        "cp pairs/heldout.tsv heldout.tsv",
    ],
    "docs/guides/language_model.md": ["printf 'The module\\n' > texts.txt"],
    "pipemesh/report/README.md": [f"{LANGUAGE_MODEL}runs/a", f"{LANGUAGE_MODEL}runs/b"],
}
WITH_COMMANDS = [
    pytest.param(
        page,
        id=name_of(page),
        marks=[] if name_of(page) in QUICK else [pytest.mark.exhaustive],
    )
    for page in PAGES
    if any(not any(re.search(each, line) for each in NOT_RUN) for line in commands_of(page))
]


# What `python -m` does.
MODULE = """
import os, runpy, sys
del sys.argv[0]
sys.path.insert(0, os.getcwd())
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
# Of the language model, one block of five: most of the time builds graphs.
SMALLER = """
from models.one_billion_word import sizes
sizes.Tiny.NUM_LAYERS = 1
"""


@pytest.fixture
def shell(tmp_path, page, pytestconfig):
    """Runs a line in a folder with small weights, figures of a model, and the page's programs."""
    programs = tmp_path / "bin"
    programs.mkdir()
    module, command = (
        shlex.join(warm("-c", (SMALLER if name_of(page) in QUICK else "") + code))
        for code in (MODULE, CODE)
    )
    python = f'case "$1" in -m) exec {module} "${{@:2}}";; esac\n'
    python += f'exec {shlex.quote(sys.executable)} "$@"'
    for name, code in {"python": python, "pipemesh": f'{command} "$@"'}.items():
        (programs / name).write_text(f"#!/bin/bash\n{code}\n")
        (programs / name).chmod(0o755)
    folder = tmp_path / "folder"
    folder.mkdir()
    models = {
        "gpt2": small.GPT2 | {"n_positions": 64},
        "llama": small.LLAMA | {"max_position_embeddings": 64},
    }
    for name, values in models.items():
        small.write(folder / name, values, small.tensors_of(values))
        small.write_tokenizer(folder / name)
    for name, code in programs_of(page).items():
        (folder / name).write_text(code)
    shutil.copy(ROOT / "benchmarks/plan/dense.json", folder / "figures.json")
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}

    def run(line):
        if name_of(page) in QUICK and pytestconfig.getoption("cases") != "all":
            # Graphs grow with microbatches.
            line = re.sub(r" --num_microbatches=\d+", "", line)
            if re.search(r"one_billion_word\.train|pipemesh train", line):
                line += " --num_microbatches=2"
        # A run that goes on takes as many steps again.
        line = re.sub(r"--steps=(\d+)", lambda n: f"--steps={int(STEPS) << (n[1] == '2000')}", line)
        line = re.sub(r"--warmup_steps=\d+", "--warmup_steps=1", line)
        trains = re.search(r"models\.\w+\.train|pipemesh train", line)
        if trains and "--steps" not in line:
            line = f"{line} --steps={STEPS}"
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line],
            **{"cwd": folder, "env": env, "capture_output": True, "text": True},
            timeout=290,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"

    return run


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_of_documents_run(page, shell, pytestconfig):
    left_out = [*NOT_RUN, *([] if pytestconfig.getoption("cases") == "all" else [SLOW])]
    for line in [*BEFORE.get(name_of(page), []), *commands_of(page)]:
        if not any(re.search(each, line) for each in left_out):
            shell(line)


def test_commands_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\nmake test    # all\npipemesh schedule \\\n    --compare\n```\n"
        "```console\n$ printf 1 > x\nanswer\n```\n\n    pipemesh plan a\n    no command\n"
    )
    assert commands_of(page) == [
        "make test",
        "pipemesh schedule --compare",
        "printf 1 > x",
        "pipemesh plan a",
    ]
