"""`pipemesh decode`, from the command line to the last line."""

import json
import re
import subprocess
import sys

import pytest

import pipemesh
from models.one_billion_word import sizes
from tests.commands import program
from tests.models.one_billion_word.program import finish, open_process, start
from tests.warm import warm

PROGRAM = """
import sys
from models.one_billion_word import sizes
sizes.Tiny.NUM_LAYERS = 2
from pipemesh.commands import main as cli
cli.main(sys.argv[1:])
"""
SPLIT = ["--mesh_shape=layers:2;model:2", "--layout=heads:model;d_ff:model;vocab:model"]
TEXTS = ["The module", "If the", "An expression is", "It", "Python has a number of"]


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    """A training as one program for all devices."""
    folder = tmp_path_factory.mktemp("decoded") / "run"
    code, _, err = finish(start("--steps=3", "--lowering=simd", f"--logdir={folder}"))
    assert code == 0, err
    return folder


@pytest.fixture
def texts(tmp_path):
    """The flag of a file of texts."""
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    return f"--file={tmp_path}/texts.txt"


def said(*flags, command="decode"):
    """The lines of standard output."""
    code, out, err = finish(open_process(warm("-c", PROGRAM, command, *flags)))
    assert code == 0, err
    # Not `splitlines`: texts may have other characters that end lines.
    return out.removesuffix("\n").split("\n")


@pytest.mark.slow
def test_standard_output_has_the_texts_alone_whatever_the_plan(logdir, texts):
    where = f"--logdir={logdir}"
    drawn = [texts, "--temperature=0.9", "--top_k=40", "--max_tokens=7"]
    found = said(where, *drawn, "--lowering=simd", "--groups=3", "--rows=1", "--stream")
    # From a checkpoint alone, whose text is not looked for.
    lines = said(f"--checkpoint={logdir}/ckpt-3", *drawn, "--plain", "--format=json")
    values = [json.loads(line) for line in lines]
    assert [each["prompt"] for each in values] == TEXTS
    whole = [each["text"] for each in values]
    # What reads the output takes "\r" for the end of a line, too, and a text may have one itself.
    assert found == re.split("\r\n|\r|\n", "\n".join(whole))
    for each in values:
        assert each["text"].startswith(each["prompt"])
        assert len(each["tokens"]) == len(each["log_probs"]) == 7 or each["stopped"]
        assert all(value <= 0 for value in each["log_probs"])


@pytest.mark.slow
def test_scores_are_those_that_a_search_had(tmp_path, logdir, monkeypatch):
    """From Python, of what a search found; by a command, of the same under another plan."""
    run = subprocess.run
    monkeypatch.setattr(
        subprocess, "run", lambda words, **how: run(warm("-c", PROGRAM, *words[3:]), **how)
    )
    # The second one has characters that begin files and end lines elsewhere.
    texts = ["It", "\ufeffAn\u2028ex\x0bpression\r"]
    found = pipemesh.decode(texts, logdir=logdir, max_tokens=5, beams=2)
    assert [each.prompt for each in found] == texts
    for each in found:
        assert len(each.tokens) == len(each.log_probs) == 5 or each.stopped
        assert len(each.others) == 1 and each.others[0][1] <= sum(each.log_probs)
    texts.insert(0, found[0].text)
    scores = pipemesh.score(iter(texts), checkpoint=logdir / "ckpt-3", plain=True)
    assert [each.text for each in scores] == texts
    for each in scores:
        assert len(each.tokens) == len(each.log_probs) and each.perplexity > 1
        assert each.log_prob == pytest.approx(sum(each.log_probs), abs=1e-4)
    # Behind the prompt, as long as the text is spelled as it was found.
    first, second, _ = scores
    begin = len(second.tokens) - 1
    same = 0
    for i, token in enumerate(found[0].tokens):
        if first.tokens[begin + i] != token:
            break
        assert abs(first.log_probs[begin + i] - found[0].log_probs[i]) < 1e-3
        same += 1
    assert same >= 3
    (tmp_path / "texts.txt").write_text(f"{first.text}\nIt\n")
    lines = said(f"--logdir={logdir}", f"--file={tmp_path}/texts.txt", *SPLIT, command="score")
    columns = [line.split("\t") for line in lines]
    for each, (log_prob, count, perplexity, text) in zip(scores[:2], columns, strict=True):
        assert abs(float(log_prob) - each.log_prob) < 1e-2
        assert (int(count), text) == (len(each.tokens), each.text)
        assert abs(float(perplexity) / each.perplexity - 1) < 1e-3


# A server that knows TensorFlow alone, and requests as TensorFlow Serving has them.
SERVER = """
import json, sys
sys.modules["pipemesh"] = sys.modules["lingvo"] = None
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2

model = tf.saved_model.load(sys.argv[1])
for line in sys.stdin:
    name, inputs = json.loads(line)
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = "model", name
    for key, value in inputs.items():
        shape = [0, 3] if value == [] and key == "ids" else None
        request.inputs[key].CopyFrom(tf.make_tensor_proto(value, tf.int32, shape))
    sent = predict_pb2.PredictRequest.FromString(request.SerializeToString())
    called = model.signatures[sent.model_spec.signature_name]
    given = {key: tf.constant(tf.make_ndarray(each)) for key, each in sent.inputs.items()}
    response = predict_pb2.PredictResponse()
    try:
        for key, value in called(**given).items():
            response.outputs[key].CopyFrom(tf.make_tensor_proto(value))
    except tf.errors.InvalidArgumentError as error:
        print(json.dumps(str(error)))
        continue
    found = predict_pb2.PredictResponse.FromString(response.SerializeToString())
    print(json.dumps({k: tf.make_ndarray(v).tolist() for k, v in found.outputs.items()}))
"""


def served(folder, *requests):
    lines = "".join(f"{json.dumps(each)}\n" for each in requests)
    done = subprocess.run(
        [sys.executable, "-c", SERVER, str(folder)],
        input=lines,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(map(json.loads, done.stdout.splitlines()))


@pytest.mark.slow
def test_tensorflow_alone_serves_what_is_exported(tmp_path, logdir, texts):
    where, to = f"--logdir={logdir}", tmp_path / "exported"
    (line,) = said(where, f"--to={to}", command="export")
    assert line.endswith("signatures score and decode, 32 tokens a row")
    flags = [where, texts, "--format=json"]
    decoded = list(map(json.loads, said(*flags, "--max_tokens=6")))
    scored = list(map(json.loads, said(*flags, command="score")))
    # The first token begins a text, the last one ends it.
    rows = [[1, *each["tokens"]] for each in scored]
    most = max(map(len, rows))

    def request(rows):
        return {
            "ids": [row + [0] * (most - len(row)) for row in rows],
            "lengths": [*map(len, rows)],
        }

    prompts = request([row[:-1] for row in rows])
    found, log_probs, alone, filled, empty, *errors = served(
        to,
        ("decode", {**prompts, "max_tokens": 6}),
        ("score", request(rows)),
        ("score", request(rows[:1])),
        # What fills rows up may be anything; and there need be no row.
        ("score", {"ids": [[*rows[0], *[-1] * 40]], "lengths": [len(rows[0])]}),
        ("decode", {"ids": [], "lengths": [], "max_tokens": 2}),
        ("decode", {**prompts, "max_tokens": 32}),
        ("decode", {**prompts, "max_tokens": 0}),
        ("score", {"ids": [[1, 400]], "lengths": [2]}),
        ("score", {"ids": [[1, 2]], "lengths": [3]}),
        ("decode", {**prompts, "max_tokens": 2**31 - 1}),
    )
    assert len(filled["log_probs"][0]) == len(rows[0]) + 40
    assert filled["log_probs"][0][: len(rows[0])] == log_probs["log_probs"][0][: len(rows[0])]
    assert empty["counts"] == []
    for row, each in enumerate(decoded):
        count = found["counts"][row]
        assert found["tokens"][row] == each["tokens"] + [0] * (6 - count)
        for one, other in zip(found["log_probs"][row], each["log_probs"], strict=False):
            assert abs(one - other) < 1e-3
    for row, each in enumerate(scored):
        wanted = [0.0, *each["log_probs"]]
        wanted += [0.0] * (most - len(wanted))
        assert (
            max(abs(a - b) for a, b in zip(log_probs["log_probs"][row], wanted, strict=True)) < 1e-3
        )
    assert len(alone["log_probs"]) == 1
    reasons = (
        "exceed the length of the model",
        "max_tokens is below 1",
        "a token is not in the vocabulary",
        "a row is longer than its ids",
        "exceed the length of the model",
    )
    for told, why in zip(errors, reasons, strict=True):
        assert why in told


REFUSED = [
    (["export"], "the folder to write to is missing; give --to=FOLDER"),
    (["export", "--to=/proc"], "--to='/proc' is there already; give a new or an empty folder"),
    (["export", "--to=x", "--mesh_shape=layers:2"], "--mesh_shape has no effect, since a model is"),
    (["export", "--to=new/out", "--max_to_keep=2"], "--max_to_keep is for training; leave it out"),
    (["score"], "no text to be scored; give either --prompt or --file"),
    (["score", "--prompt=a", "--remat=none"], "--remat is for training; leave it out"),
    (["score", "--prompt=a", "--max_tokens=3"], "unknown flag --max_tokens"),
    (["decode"], "no text to be continued; give either --prompt or --file"),
    (["decode", "--prompt=a", "--file=b"], "give either --prompt or --file"),
    (["decode", "--prompt="], "--prompt='' is empty; give some text"),
    (["decode", "--prompt=a", "--max_tokens=0"], "max_tokens"),
    (
        ["decode", "--prompt=a", "--beams=2", "--top_k=4"],
        "--beams searches and --top_k is for drawing",
    ),
    (["decode", "--prompt=a", "--beams=2", "--stream"], "--stream prints text as it comes"),
    (
        ["decode", "--prompt=a", "--length_penalty=2"],
        "--length_penalty is for a search; give --beams",
    ),
    (["decode", "--prompt=a", "--top_k=4"], "are for drawing; give a temperature above 0"),
    (["decode", "--prompt=a", "--temperature=1", "--top_p=0"], "top_p is 0.0; give a probability"),
    (["decode", "--prompt=a", "--beams=2", "--length_penalty=inf"], "length_penalty is inf; give"),
    (["decode", "--prompt=a", "--seed=3"], "--seed is for training; leave it out"),
    (["decode", "--prompt=a", "--device_memory=1GiB"], "--device_memory is for training; leave"),
    (["decode", "--prompt=a", "--elastic"], "--elastic is for training; leave it out"),
    (["decode", "--prompt=a", "--schedule=gpipe"], "--schedule is for training; leave it out"),
    (["decode", "--prompt=a", "--learning_rate=1"], "--learning_rate is for training; leave it"),
    (
        ["decode", "--prompt=a", "--vocab_size=500"],
        "checkpoint of another model (vocab_size 400 -> 500",
    ),
    (["decode", "--prompt=a", "--mesh_shape=layers:9"], "at most 4 stages"),
    (["decode", "--file=/no/such/file"], "--file='/no/such/file' cannot be read"),
    (["decode", "--file=/dev/null"], "--file='/dev/null' is empty; give a text a line"),
    (["decode", "--prompt=a", "--checkpoint=/no/such"], "there is no checkpoint /no/such"),
]


@pytest.mark.slow
def test_what_cannot_be_had_is_one_line_without_tensorflow(logdir):
    lines = [[command, f"--logdir={logdir}", *flags] for (command, *flags), _ in REFUSED]
    answers = program.without_tensorflow(*lines, ["decode"], layers=2)
    wanted = [*REFUSED, (["decode"], "no training is named; give the --logdir of one")]
    for (words, told), (code, out, err) in zip(wanted, answers, strict=True):
        assert (code, out, err.count("\n")) == (2, "", 1), (words, err)
        assert told in err, words


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["decode", "--prompt=a " + "word " * 60],
            "tokens, with 24 more it exceeds the model's 32; give a",
        ),
        (
            ["decode", "--prompt=a", "--beams=900"],
            "900 beams look at 1800 tokens, but there are 400",
        ),
        (
            [
                *("decode", "--prompt=a", "--lowering=simd", "--mesh_shape=data:2"),
                *("--layout=batch:data", "--rows=3"),
            ],
            "--rows=3: as one program for all devices it is split 2 ways; give a multiple of 2",
        ),
        (
            ["score", "--prompt=" + "word " * 60],
            "tokens to be scored, which exceeds the model's 32",
        ),
        (["export", "--to=x", "--length=33"], "--length=33: the model has 32 at most; give fewer"),
    ],
)
def test_what_the_model_lacks_is_one_line(logdir, monkeypatch, words, told):
    monkeypatch.setattr(sizes.Tiny, "NUM_LAYERS", 2)
    command, *flags = words
    assert told in program.refused(command, f"--logdir={logdir}", *flags)


@pytest.mark.slow
def test_output_that_nobody_reads_ends_the_program(logdir):
    flags = [f"--logdir={logdir}", "--prompt=It", "--max_tokens=2"]
    command = warm("-c", PROGRAM, "decode", *flags)
    with open("/dev/full", "w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=240)
    assert done.returncode == 2, done.stderr
    assert "standard output cannot be written to (No space left" in done.stderr


_OF_TRAINING = ("--steps", "--early_stop", "--keep_best", "--find_learning_rate", "--elastic")


HELP = [
    ("train", ["model and files", "plan", "--model", "--steps", "--early_stop"], ["--prompt"]),
    ("evaluate", ["--logdir", "--mesh_shape", "--dataset", "--cluster"], _OF_TRAINING),
    ("predict", ["--logdir", "--mesh_shape", "--dataset", "--cluster"], _OF_TRAINING),
    ("decode", ["required", "--beams", "--checkpoint", "--lowering"], _OF_TRAINING),
    ("score", ["required", "--format", "--checkpoint", "--device_type"], _OF_TRAINING),
    ("export", ["required", "--to", "--checkpoint"], [*_OF_TRAINING, "--mesh_shape"]),
    ("lm decode", ["--beams", "--checkpoint", "--mesh_shape"], ()),
]


def test_help_lists_what_a_command_takes():
    answers = program.without_tensorflow(*([command, "--help"] for command, *_ in HELP))
    for (command, has, lacks), (code, out, err) in zip(HELP, answers, strict=True):
        assert (code, err) == (0, ""), command
        words = set(re.findall(r"^([a-z ]+):$|^  (?:-\w, )?(--\w+)", out, re.MULTILINE))
        words = {title or flag for title, flag in words}
        assert words.issuperset(has) and words.isdisjoint(lacks), out
        if "required" in has:
            assert "\nrequired:\n  --logdir" in out.partition("\nplan:")[0]
