"""Judging of imported models: tasks of lm-eval and perplexity of a file, as by their peers."""

import gzip
import json
import math
import shutil
import sys
import types

import numpy as np
import pytest

from models.pretrained import transfer
from pipemesh.commands import judge
from pipemesh.decoding.scorer import windows
from tests.commands import program
from tests.models.one_billion_word.program import finish, open_process
from tests.models.pretrained import reference, small

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SPLIT = ["--mesh_shape=layers:2;model:2", "--layout=heads:model;d_ff:model;vocab:model"]
VALUES = small.GPT2 | {"vocab_size": len(small.WORDS), "bos_token_id": 1, "eos_token_id": 6}
TEXT = "the cat sat on a mat the mat sat on the cat " * 3


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model with a tokenizer that begins each text with a token of its own."""
    folder = tmp_path_factory.mktemp("judged")
    small.write(folder / "in", VALUES, small.tensors_of(VALUES))
    small.write_tokenizer(folder / "in")
    transfer.import_weights(str(folder / "in"), str(folder / "run"))
    return folder / "run"


def test_each_token_is_in_one_window():
    for length, stride in ((4, 2), (4, 3), (5, 1), (2, 1)):
        for size in range(2, 20):
            found = [ids[-count:] for ids, count in windows(range(size), length, stride)]
            assert [token for part in found for token in part] == list(range(1, size))
            assert all(len(ids) <= length for ids, _ in windows(range(size), length, stride))


def log_prob_of(ids, window, stride):
    """By the formulas of the model, window by window."""
    total, counted = 0.0, 1
    for begin in range(0, len(ids), stride):
        part = ids[begin : begin + window]
        logits = reference.gpt2(VALUES, small.tensors_of(VALUES), part[:-1])
        logits = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
        rows = [logits[i, token] for i, token in enumerate(part[1:])]
        total += sum(rows[counted - begin - 1 :])
        counted = begin + len(part)
        if counted == len(ids):
            return total
    raise AssertionError


def test_perplexity_of_a_file_is_that_of_the_formulas(run, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    ids = [1, *(small.WORDS.index(word) for word in TEXT.split())]
    words = ["evaluate", f"--logdir={run}", f"--text={path}"]
    found = json.loads(program.done(*words, "--format=json", *SPLIT))
    assert (found["window"], found["stride"], found["tokens"]) == (16, 8, len(ids) - 1)
    wanted = log_prob_of(ids, 16, 8)
    np.testing.assert_allclose(found["log_prob"], wanted, rtol=0, atol=1e-3)
    numbers = {"token": len(ids) - 1, "word": len(TEXT.split()), "byte": len(TEXT)}
    for name, number in numbers.items():
        perplexity = math.exp(-wanted / number)
        np.testing.assert_allclose(found[f"{name}_perplexity"], perplexity, rtol=1e-4)
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    line = program.done(*words[:2], f"--text={path}.gz", "--window=7", "--stride=2")
    perplexity = math.exp(-log_prob_of(ids, 7, 2) / (len(ids) - 1))
    assert f"perplexity {perplexity:.4f} a token" in line and "windows of 7 tokens, 2 apart" in line
    assert "overlap; give at most 6" in program.refused(*words, "--window=7", "--stride=7")
    assert "the model has 16 tokens at most" in program.refused(*words, "--window=17")
    assert "cannot be read" in program.refused("evaluate", f"--logdir={run}", "--text=/none")
    path.write_text("")
    assert "has 1 tokens; give a longer one" in program.refused(*words)
    line = program.refused("evaluate", f"--logdir={run}", "--window=7")
    assert "--window is for --text=FILE; give it, or leave --window out" in line


def test_lm_eval_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    with pytest.raises(ImportError, match=r"pipemesh lm_eval needs lm_eval.*\[judging\]"):
        judge.lm_eval(["pipemesh lm_eval", "--tasks=a"])


# Tasks of their own: which continuation is likelier, how likely texts are, what comes next.
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: choices
doc_to_target: 0
metric_list: [{metric: acc}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
""",
    "next": """
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["mat"], max_gen_toks: 5}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def peer(run, tmp_path_factory):
    """The same weights for lm-eval's `hf`, and tasks in a folder."""
    reason = "lm-eval is not installed: pip install -e '.[dev,peers,judging]'"
    registry = pytest.importorskip("lm_eval.api.registry", reason=reason)
    pytest.importorskip("torch", reason=reason)
    package = pytest.importorskip("transformers", reason=reason)
    folder = tmp_path_factory.mktemp("peer")
    shutil.copytree(run.parent / "in", folder / "theirs")
    package.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "theirs" / "tokenizer.json"),
        bos_token="[BOS]",
        eos_token="mat",
        unk_token="[UNK]",
    ).save_pretrained(folder / "theirs")
    small.write(folder / "theirs", VALUES, small.tensors_of(VALUES))
    rng = np.random.default_rng(5)
    docs = []
    for number in range(12):
        words = [small.WORDS[i] for i in rng.choice([2, 3, 4, 5, 7], 24)]
        docs.append(
            {
                "context": " ".join(words[: 1 + number]),
                "choices": [" " + " ".join(words[20 : 21 + i]) for i in range(3)],
                "text": " ".join(words),
            }
        )
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (folder / "tasks").mkdir()
    for name, content in TASKS.items():
        about = (
            f"task: own_{name}\ndataset_path: json\ntest_split: test\n"
            f"dataset_kwargs: {{data_files: {{test: {folder}/docs.jsonl}}}}\n"
        )
        (folder / "tasks" / f"{name}.yaml").write_text(about + content)
    model = registry.get_model("hf")(
        pretrained=str(folder / "theirs"), device="cpu", dtype="float32"
    )
    return types.SimpleNamespace(folder=folder, docs=docs, model=model)


# Answers requests of a file, in a process that starts its devices.
ANSWERS = """
import json, sys
from lm_eval.api.instance import Instance
from pipemesh.commands.judge import language_model
with open(sys.argv[1]) as file:
    flags, requests = json.load(file)
model = language_model()(**flags)
answers = {"prefix": model.prefix_token_id}
for kind, values in requests.items():
    asked = [Instance(kind, {}, tuple(value), number) for number, value in enumerate(values)]
    answers[kind] = getattr(model, kind)(asked)
print(json.dumps(answers))
"""


@pytest.mark.parametrize("plan", [{}, {"mesh_shape": "layers:2;model:2", "layout": SPLIT[1][9:]}])
def test_answers_are_those_of_lm_evals_own_model(run, peer, tmp_path, plan):
    from lm_eval.api.instance import Instance

    def theirs(kind, values):
        asked = [Instance(kind, {}, tuple(value), number) for number, value in enumerate(values)]
        return getattr(peer.model, kind)(asked)

    contexts = [doc["context"] for doc in peer.docs]
    requests = {"generate_until": [[text, {"until": [], "max_gen_toks": 3}] for text in contexts]}
    said = theirs("generate_until", requests["generate_until"])
    # What the model itself says next, no context, and more than it sees at once.
    pairs = [[doc["context"], text] for doc in peer.docs for text in doc["choices"]]
    pairs += [[text, f" {more}"] for text, more in zip(contexts, said, strict=True) if more]
    pairs += [["", "the cat"], [peer.docs[0]["text"], " the cat"], [" the cat ", "sat"]]
    requests["loglikelihood"] = pairs
    requests["loglikelihood_rolling"] = [[doc["text"]] for doc in peer.docs]
    (tmp_path / "requests").write_text(json.dumps([{"logdir": str(run), **plan}, requests]))
    child = open_process([sys.executable, "-c", ANSWERS, str(tmp_path / "requests")])
    code, out, err = finish(child)
    assert code == 0, err
    ours = json.loads(out.splitlines()[-1])
    assert ours["prefix"] == peer.model.prefix_token_id == 1
    # By `transformers` [UNK] is a special token, which it leaves out of texts.
    shown = [text.replace("[UNK]", "").split() for text in ours["generate_until"]]
    assert shown == [text.split() for text in said]
    found, wanted = ours["loglikelihood"], theirs("loglikelihood", pairs)
    np.testing.assert_allclose([a for a, _ in found], [a for a, _ in wanted], rtol=0, atol=1e-4)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in wanted]
    assert {is_greedy for _, is_greedy in found} == {True, False}
    wanted = theirs("loglikelihood_rolling", requests["loglikelihood_rolling"])
    np.testing.assert_allclose(ours["loglikelihood_rolling"], wanted, rtol=0, atol=1e-4)


def test_tasks_run_by_the_command(run, peer, tmp_path):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(peer.folder / "tasks"))
    names = [f"own_{name}" for name in TASKS]
    theirs = simple_evaluate(model=peer.model, tasks=names, task_manager=manager)
    layout = f"mesh_shape=layers:2;model:2,{SPLIT[1][2:]}"
    program.done(
        "lm_eval",
        f"--model_args=logdir={run},{layout}",
        f"--tasks={','.join(names)}",
        f"--include_path={peer.folder}/tasks",
        f"--output_path={tmp_path}",
    )
    (path,) = tmp_path.glob("**/results*.json")
    ours = json.loads(path.read_text())["results"]
    for name in names:
        for metric, value in theirs["results"][name].items():
            if isinstance(value, float):
                np.testing.assert_allclose(ours[name][metric], value, rtol=1e-4, err_msg=name)
    line = program.refused("lm_eval", "--model=hf", f"--model_args=logdir={run}", "--tasks=a")
    assert "--model is pipemesh here; leave it out" in line


def test_perplexity_is_that_of_the_guide_of_transformers(run, peer, tmp_path):
    """Its loop: labels of the tokens before the new ones are -100."""
    import torch

    (tmp_path / "text").write_text(TEXT)
    words = ["evaluate", f"--logdir={run}", f"--text={tmp_path}/text", "--format=json"]
    found = json.loads(program.done(*words, "--window=10", "--stride=4"))
    ids = torch.tensor([peer.model.tok_encode(TEXT)])
    total, number, before = 0.0, 0, 0
    for begin in range(0, ids.shape[1], 4):
        end = min(begin + 10, ids.shape[1])
        part = ids[:, begin:end]
        labels = part.clone()
        labels[:, : before - end] = -100 if before else labels[:, : before - end]
        with torch.no_grad():
            loss = peer.model.model(part, labels=labels).loss.item()
        count = int((labels[:, 1:] != -100).sum())
        total, number, before = total + loss * count, number + count, end
        if end == ids.shape[1]:
            break
    assert number == found["tokens"]
    np.testing.assert_allclose(found["token_perplexity"], math.exp(total / number), rtol=1e-4)
