"""A plan is a value: it is checked whole, printed, parsed back and compared."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.errors import LayoutError, MeshError, PipemeshError, PlanError, ScheduleError
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.plan import Plan, Remat
from pipemesh.plan.plan import (
    DTYPES,
    LOWERINGS,
    join_texts,
    split_text,
)
from pipemesh.plan.remat import CUSTOM, NAMES
from pipemesh.schedule import Costs, list_schedule, one_f_one_b, write_csv

TABLE = list_schedule(Costs(), 2, 4, stage_devices=(0, 1, 1, 0))


@st.composite
def plans(draw):
    homes, replicas = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    name = draw(
        st.sampled_from(["1f1b", "gpipe", "interleaved:2", "zb_h1", "zb_v", "looped_bfs:3"])
    )
    number = homes * draw(st.integers(1, 3))
    num_stages = Plan(Mesh((("layers", homes),)), schedule=name, num_microbatches=number).num_stages
    sizes = draw(st.none() | st.lists(st.integers(1, 3), min_size=num_stages, max_size=num_stages))
    boundaries = None if sizes is None else tuple(sum(sizes[:i]) for i in range(len(sizes) + 1))
    axes = draw(st.permutations([("layers", homes), ("data", replicas), ("model", 1)]))
    return Plan(
        Mesh(tuple(axes)),
        LayoutRules.from_text(draw(st.sampled_from(["batch:data", "batch:data;heads:model"]))),
        name,
        number,
        boundaries,
        Remat((draw(st.sampled_from((*NAMES, CUSTOM))),)),
        draw(st.sampled_from(LOWERINGS)),
        draw(st.sampled_from((None, *DTYPES))),
        draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(plans())
def test_text_and_json_parse_back(plan):
    assert Plan.from_text(str(plan)) == plan
    assert Plan.from_json(plan.to_json()) == plan
    assert hash(Plan.from_text(str(plan))) == hash(plan)
    assert plan.changes(plan) == {}
    # Homes share the processors of the mesh out.
    owned = {home: plan.home(s) for s, home in enumerate(plan.table.stage_devices)}
    everyone = sorted(p for home in owned.values() for p in home)
    assert everyone == list(range(plan.mesh.num_devices))


@pytest.mark.parametrize("to_and_back", [lambda p: Plan.from_text(str(p)),
                                         lambda p: Plan.from_json(p.to_json())])  # fmt: skip
def test_a_table_goes_with_its_plan(to_and_back):
    plan = Plan("layers:2", schedule=TABLE, num_microbatches=4, boundaries=(0, 1, 2, 3, 5))
    again = to_and_back(plan)
    assert again.table.rows == TABLE.rows and again.num_stages == 4
    assert again.boundaries == (0, 1, 2, 3, 5)


def test_a_file_of_a_schedule(tmp_path):
    path = tmp_path / "a table.csv"
    path.write_text(write_csv(one_f_one_b(2, 4)))
    plan = Plan("layers:2", schedule=f"file:{path}", num_microbatches=4)
    assert Plan.from_text(str(plan)).table == one_f_one_b(2, 4)


def test_texts_of_saved_plans_stay():
    """Checkpoints, records and `config.toml` keep these."""
    values = {
        "mesh": "layers:2;data:2",
        "layout": "batch:data",
        "schedule": "zb_h1",
        "num_microbatches": "4",
        "boundaries": "0,3,7",
        "remat": "full,custom",
        "lowering": "placement",
        "compute_dtype": "bfloat16",
        "allow_idle": "false",
    }
    plan = Plan.from_values(values)
    assert plan.to_values() == values and json.loads(plan.to_json()) == values
    assert plan.remat == Remat(("full", "custom"))
    assert str(plan).endswith("boundaries=0,3,7 remat=full,custom compute_dtype=bfloat16")


def test_defaults_are_not_written():
    assert Plan.from_text("") == Plan()
    assert str(Plan()) == "mesh=layers:1"
    text = "mesh=data:2;layers:2 layout=batch:data remat=none compute_dtype=bfloat16"
    assert str(Plan.from_text(text)) == text


def test_plans_are_compared_value_by_value():
    one = Plan("layers:2", num_microbatches=4)
    other = dataclasses.replace(one, num_microbatches=8, remat="none")
    assert one.changes(other) == {"num_microbatches": ("4", "8"), "remat": ("full", "none")}


BAD = [
    (lambda: Plan("layers:2;data:2"), PlanError, "nothing is split over the axis 'data'.*allow"),
    (lambda: Plan("layers:2;data:2", "batch:dta"), LayoutError, "did you mean 'data'"),
    (lambda: Plan("layers:2", "batch:layers"), LayoutError, "along which the stages lie"),
    (
        lambda: Plan("layers:2;data:2", "batch:data;embed:data", lowering="simd"),
        LayoutError,
        "rule 'embed:data' cuts weights .* lowering='simd' has no actions",
    ),
    (lambda: Plan("layers:2;a:2;b:2", "batch:a"), PlanError, "axis 'b' .*same; leave the axis out"),
    (lambda: Plan("layers:x"), MeshError, "'layers:x'"),
    (lambda: Plan(schedule="gpip"), ScheduleError, "did you mean 'gpipe'"),
    (lambda: Plan(schedule=3), PlanError, "schedule is 3; give a name or a Schedule"),
    (lambda: Plan("layers:3", schedule=TABLE, num_microbatches=4), PlanError, "2 devices and 4 mi"),
    (lambda: Plan(num_microbatches=0), PlanError, "a whole number from 1 on"),
    (lambda: Plan(num_microbatches=True), PlanError, "a whole number from 1 on"),
    (lambda: Plan(remat="ful"), PlanError, "'ful' is no policy; did you mean 'full'"),
    (
        lambda: Plan(remat="full,none"),
        PlanError,
        "remat is 'full,none', which has 2 policies, but there are 1 stages",
    ),
    (lambda: Plan(lowering="placment"), PlanError, "did you mean 'placement'"),
    (lambda: Plan(compute_dtype="half"), PlanError, "known: 'float32', 'bfloat16', 'float16'"),
    (lambda: Plan(mesh=None), PlanError, "mesh is None; give a Mesh or its text"),
    (lambda: Plan("layers:2", boundaries=(0, 3)), PlanError, "2 stages have 3 layer indices"),
    (lambda: Plan("layers:2", boundaries=(0, 3, 3)), PlanError, "which rise from 0"),
    (lambda: Plan("layers:2", boundaries=(1, 3, 5)), PlanError, "which rise from 0"),
    (lambda: Plan(allow_idle="yes"), PlanError, "allow_idle is 'yes'; it must be True or False"),
    (lambda: Plan("layers:2").check_layers(1), PlanError, "2 stages, but there are 1 lay"),
    (lambda: Plan(boundaries=(0, 5)).check_layers(6), PlanError, "end at 5, but there are 6"),
    (
        lambda: Plan("layers:1;m:2", "heads:m").check_dims(["batch"]),
        LayoutError,
        "names dim 'heads'",
    ),
    (lambda: Plan("layers:2").home(2), PlanError, "there is no stage 2; the plan has 0 to 1"),
    (lambda: Plan.from_text("layers:2"), PlanError, "'layers:2' in plan .* is not name=value"),
    (lambda: Plan.from_text("mehs=layers:2"), PlanError, "did you mean 'mesh'"),
    (
        lambda: Plan.from_text("num_microbatches=x"),
        PlanError,
        "num_microbatches='x': 'x' is no who",
    ),
    (lambda: Plan.from_text("num_microbatches=-1"), PlanError, "'-1' is no whole number"),
    (lambda: Plan.from_text("boundaries=0,,5"), PlanError, "'' is no whole number"),
    (lambda: Plan.from_text("allow_idle=True"), PlanError, "it must be true or false"),
    (lambda: Plan.from_text("schedule=table:nonsense"), PipemeshError, "nonsense"),
    (lambda: Plan.from_text("remat=table:0F0"), PlanError, "is no policy"),
    (lambda: Plan.from_text("mesh=layers:x"), MeshError, "mesh='layers:x': "),
    (lambda: Plan.from_text("mesh=a mesh=b"), PlanError, "'mesh' is given twice in plan"),
    (lambda: Plan.from_text("mesh='a"), PlanError, "cannot be read"),
    (lambda: Plan.from_text(None), PlanError, "None is no text"),
    (lambda: Plan.from_json("{"), PlanError, "the plan is no JSON"),
    (lambda: Plan.from_json("[1]"), PlanError, r"is \[1\]; it must be a JSON object of texts"),
    (lambda: Plan.from_json('{"num_microbatches": 3}'), PlanError, "is 3; it must be a text"),
]


@pytest.mark.parametrize(("make", "error", "text"), BAD, ids=[text for _, _, text in BAD])
def test_invalid_plans_are_errors(make, error, text):
    with pytest.raises(error, match=text) as raised:
        make()
    assert isinstance(raised.value, PipemeshError)


def test_idle_devices_may_be_allowed():
    plan = Plan("layers:2;data:2", allow_idle=True)
    assert plan.num_replicas == 1 and plan.home(1) == (2, 3)


def test_a_batch_divides_among_microbatches_and_replicas():
    plan = Plan("layers:2;data:2", "batch:data", num_microbatches=4)
    plan.check_batch(16)
    with pytest.raises(PlanError, match="20 does not divide into 4 microbatches of 2 replicas"):
        plan.check_batch(20)
    with pytest.raises(
        PlanError, match=r"9 does not divide into 2 microbatches; num_micro.* 1, 3, 9"
    ):
        Plan(num_microbatches=2).check_batch(9)
    with pytest.raises(PlanError, match=r"21 does not divide among the 2 replicas .* axis 'data'"):
        plan.check_batch(21)
    # At once, however large.
    with pytest.raises(PlanError, match="may be 1, 2, 4, "):
        Plan(num_microbatches=3).check_batch(2**40)


@pytest.mark.parametrize(
    "text", ["", "a b", "it's", '"', "a=b", "layers:2;data:2", "a\nb", "\\", "#", "$x", "ä*"]
)
def test_joined_texts_split_again(text):
    texts = {"a": text, "b": "c"}
    assert split_text(join_texts(texts)) == texts


def test_only_blanks_are_quoted():
    texts = {"mesh": "layers:2;data:2", "schedule": "a b", "layout": ""}
    assert join_texts(texts) == "mesh=layers:2;data:2 schedule='a b' layout=''"
