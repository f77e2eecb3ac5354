import jax
import pytest

from meshloom.sharding import Rules, data, fsdp, resolve, tensor
from meshloom.sharding.rules import Rule


def test_of_accepts_every_form_of_candidates():
    rules = Rules.of(
        {
            "norm": None,
            "mlp": "tensor",
            "batch": ("data", "fsdp"),
            "heads": ["tensor", ("data", "fsdp"), None],
        }
    )
    assert [row.candidates for row in rules.rows] == [
        ((),),
        (("tensor",),),
        (("data", "fsdp"),),
        (("tensor",), ("data", "fsdp"), ()),
    ]
    assert str(rules.rows[3]) == "heads -> tensor | data+fsdp | replicated  [rules]"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "got 3. Write several candidates as a list."),
        (("tensor", None), r"got \('tensor', None\)"),
        ([["tensor"]], r"got \['tensor'\]"),
        ({"tensor"}, "got {'tensor'}"),
        ([], "rule for 'mlp' has no candidate; write None to replicate it"),
        (("fsdp", "fsdp"), r"candidate \('fsdp', 'fsdp'\) names a mesh axis twice"),
    ],
)
def test_bad_candidates_are_errors(value, message):
    with pytest.raises(ValueError, match=message):
        Rules.of({"mlp": value})


def test_an_unknown_role_is_an_error():
    with pytest.raises(ValueError, match="role 'grad' of plan 'mine' is unknown. Role"):
        Rules.of({"mlp": None}, role="grad", plan="mine")  # pyright: ignore


def test_a_row_for_the_role_takes_precedence():
    rules = Rules.of({"embed": "fsdp"}, role="param") + Rules.of({"mlp": "tensor"})
    rules = Rules.of({"embed": None}) + rules
    result = {role: rules.find("embed", role) for role in ("param", "compute")}
    assert result["param"] and result["param"].candidates == (("fsdp",),)
    assert result["compute"] and result["compute"].candidates == ((),)
    assert rules.find("vocab", "param") is None


def test_a_later_row_without_a_role_replaces_rows_of_every_role():
    rules = fsdp() + Rules.of({"embed": "tensor"}, plan="mine")
    for role in ("param", "compute", "optimizer"):
        row = rules.find("embed", role)
        assert row and row.plan == "mine"
    assert {(old.role, new.plan) for old, new in rules.replaced} == {
        ("param", "mine"),
        ("optimizer", "mine"),
    }


def test_an_equal_row_is_not_recorded_as_replaced():
    assert (tensor() + tensor()) == tensor()


def also(**table) -> Rules:
    return Rules.of(table, role="param", plan="more", also=True)


def candidates(rules: Rules, role="param"):
    row = rules.find("embed", role)
    return row and row.candidates


def test_also_tries_each_candidate_with_its_axes_appended():
    base = Rules.of({"embed": ["fsdp", ("data", "tensor")]}, plan="base")
    rules = base + also(embed="pipe")
    assert candidates(rules) == (
        ("fsdp", "pipe"),
        ("fsdp",),
        ("data", "tensor", "pipe"),
        ("data", "tensor"),
    )
    assert candidates(rules, "compute") == candidates(base)
    row = rules.find("embed", "param")
    assert row and str(row) == (
        "embed (param) -> fsdp+pipe | fsdp | data+tensor+pipe | data+tensor  "
        "[base+more]"
    )


def test_also_shards_what_was_replicated_and_tries_replicated_last():
    rules = Rules.of({"embed": None}) + also(embed="pipe")
    assert candidates(rules) == (("pipe",), ())


def test_also_replaces_nothing():
    rules = Rules.of({"embed": "fsdp"}, role="param") + also(embed="pipe")
    assert rules.replaced == ()
    assert len(rules.rows) == 1


def test_also_without_an_earlier_table_is_kept_as_written():
    rules = also(embed="pipe")
    assert candidates(rules) == (("pipe",),)
    assert str(rules) == "embed (param) -> also pipe  [more]"


def test_also_applies_to_the_table_it_is_added_to():
    parts = Rules.of({"mlp": "tensor"}) + also(embed="pipe")
    rules = Rules.of({"embed": "fsdp"}) + parts
    assert candidates(rules) == (("fsdp", "pipe"), ("fsdp",))


def test_a_later_row_replaces_both():
    rules = Rules.of({"embed": "fsdp"}) + also(embed="pipe")
    rules += Rules.of({"embed": None}, plan="last")
    assert candidates(rules) == ((),)
    assert [new.plan for _, new in rules.replaced] == ["last", "last"]


@pytest.mark.parametrize(
    ("table", "role"), [({"embed": "pipe"}, None), ({"embed": ["pipe", None]}, "param")]
)
def test_also_needs_a_role_and_one_candidate(table, role):
    with pytest.raises(ValueError) as error:
        Rules.of(table, role=role, plan="mine", also=True)
    assert str(error.value) == (
        "plan 'mine': also=True needs a role and one candidate for each name, got "
        f"role {role} and {table}"
    )


def test_addition_is_associative():
    a, b, c = data(), fsdp(), tensor()
    assert ((a + b) + c).rows == (a + (b + c)).rows


def test_the_same_name_twice_is_an_error():
    row = Rule("mlp", ((),))
    with pytest.raises(ValueError, match="rules name 'mlp' twice for the same role: "):
        Rules((row, row))


def test_without_replicates_names_in_every_role():
    rules = (data() + fsdp()).without("batch", "embed")
    for role in ("param", "compute", "optimizer"):
        row = rules.find("embed", role)
        assert row and row.candidates == ((),)
    assert rules.find("batch", "compute").candidates == ((),)  # pyright: ignore
    assert rules.find("mlp", "param").plan == "data"  # pyright: ignore


def test_a_role_that_does_not_exist_is_refused_with_a_suggestion():
    tree = {"w": jax.ShapeDtypeStruct((8,), "float32")}
    with pytest.raises(ValueError) as error:
        resolve(tree, data(), {"data": 2}, axes={"w": (None,)}, role="optimiser")  # pyright: ignore
    assert str(error.value) == (
        "role 'optimiser' is unknown. Did you mean 'optimizer'? Roles: param, compute, "
        "optimizer."
    )
    with pytest.raises(ValueError, match="^role 'params' of plan 'x' .*you mean 'para"):
        Rules.of({"mlp": None}, role="params", plan="x")  # pyright: ignore
    with pytest.raises(ValueError, match="^role 'x' of the rule for 'a' "):
        Rule("a", ((),), "x")  # pyright: ignore


def test_mesh_axes_can_be_renamed():
    rules = (data() + fsdp() + tensor()).rename_axes({"tensor": "model"})
    assert rules.find("mlp", "param").candidates == (("model",),)  # pyright: ignore
    assert "tensor" not in rules.mesh_axes
    # Two axes that map to one are named once.
    both = (data() + fsdp()).rename_axes({"fsdp": "data"})
    assert both.find("batch", "compute").candidates == (  # pyright: ignore
        ("replica", "data", "expert"),
    )
    with pytest.raises(ValueError) as error:
        tensor().rename_axes({"tesnor": "model"})
    assert str(error.value) == (
        "rename_axes: no rule names mesh axis 'tesnor'. The rules name tensor."
    )
