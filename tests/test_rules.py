import jax
import pytest

from meshloom.sharding import MeshSpec, Rules, data, fsdp, lint, resolve, tensor
from meshloom.sharding.rules import Row


def test_of_reads_every_way_to_write_candidates():
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
    assert str(rules.rows[3]) == "heads -> tensor | data+fsdp | whole  [rules]"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "got 3. Write several candidates as a list."),
        (("tensor", None), r"got \('tensor', None\)"),
        ([["tensor"]], r"got \['tensor'\]"),
        ({"tensor"}, "got {'tensor'}"),
        ([], "rule for 'mlp' has no candidate; write None to not cut it"),
        (("fsdp", "fsdp"), r"candidate \('fsdp', 'fsdp'\) names a mesh axis twice"),
    ],
)
def test_bad_candidates(value, message):
    with pytest.raises(ValueError, match=message):
        Rules.of({"mlp": value})


def test_unknown_role():
    with pytest.raises(ValueError, match="role 'grad' of plan 'mine' is unknown. Role"):
        Rules.of({"mlp": None}, role="grad", plan="mine")  # pyright: ignore


def test_a_row_for_the_role_comes_before_a_row_for_all():
    rules = Rules.of({"embed": "fsdp"}, role="param") + Rules.of({"mlp": "tensor"})
    rules = Rules.of({"embed": None}) + rules
    found = {role: rules.find("embed", role) for role in ("param", "compute")}
    assert found["param"] and found["param"].candidates == (("fsdp",),)
    assert found["compute"] and found["compute"].candidates == ((),)
    assert rules.find("vocab", "param") is None


def test_a_later_row_for_all_replaces_rows_of_every_role():
    rules = fsdp() + Rules.of({"embed": "tensor"}, plan="mine")
    for role in ("param", "compute", "optimizer"):
        row = rules.find("embed", role)
        assert row and row.plan == "mine"
    assert {(old.role, new.plan) for old, new in rules.replaced} == {
        ("param", "mine"),
        ("optimizer", "mine"),
    }


def test_a_row_said_twice_is_not_called_replaced():
    assert (tensor() + tensor()) == tensor()


def also(**table) -> Rules:
    return Rules.of(table, role="param", plan="more", also=True)


def candidates(rules: Rules, role="param"):
    row = rules.find("embed", role)
    return row and row.candidates


def test_a_row_that_cuts_also_tries_each_candidate_with_its_axes_behind():
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


def test_it_cuts_what_was_whole_and_says_whole_last():
    rules = Rules.of({"embed": None}) + also(embed="pipe")
    assert candidates(rules) == (("pipe",), ())


def test_it_replaces_nothing():
    rules = Rules.of({"embed": "fsdp"}, role="param") + also(embed="pipe")
    assert rules.replaced == ()
    assert len(rules.rows) == 1


def test_without_a_table_before_it_stands_as_it_is():
    rules = also(embed="pipe")
    assert candidates(rules) == (("pipe",),)
    assert str(rules) == "embed (param) -> also pipe  [more]"


def test_it_waits_for_the_table_it_is_added_to():
    parts = Rules.of({"mlp": "tensor"}) + also(embed="pipe")
    rules = Rules.of({"embed": "fsdp"}) + parts
    assert candidates(rules) == (("fsdp", "pipe"), ("fsdp",))


def test_a_later_row_has_its_say_over_both():
    rules = Rules.of({"embed": "fsdp"}) + also(embed="pipe")
    rules += Rules.of({"embed": None}, plan="last")
    assert candidates(rules) == ((),)
    assert [new.plan for _, new in rules.replaced] == ["last", "last"]


@pytest.mark.parametrize(
    ("table", "role"), [({"embed": "pipe"}, None), ({"embed": ["pipe", None]}, "param")]
)
def test_cutting_also_needs_one_role_and_one_candidate(table, role):
    with pytest.raises(ValueError) as error:
        Rules.of(table, role=role, plan="mine", also=True)
    assert str(error.value) == (
        "plan 'mine': rows that cut also over more mesh axes need one role and one "
        f"candidate each, got role {role} and {table}"
    )


def test_addition_is_associative():
    a, b, c = data(), fsdp(), tensor()
    assert ((a + b) + c).rows == (a + (b + c)).rows


def test_one_name_twice_is_an_error():
    row = Row("mlp", ((),))
    with pytest.raises(ValueError, match="rules name 'mlp' twice for the same role: "):
        Rules((row, row))


def test_without_leaves_names_whole_in_every_role():
    rules = (data() + fsdp()).without("batch", "embed")
    for role in ("param", "compute", "optimizer"):
        row = rules.find("embed", role)
        assert row and row.candidates == ((),)
    assert rules.find("batch", "compute").candidates == ((),)  # pyright: ignore
    assert rules.find("mlp", "param").plan == "data"  # pyright: ignore


def test_lint_tells_of_rows_that_do_nothing():
    rules = (
        Rules.of({"embed": None, "mlp": "data", "vocab": None}, plan="a")
        + Rules.of({"mlp": "tensor", "heads": [None, "tensor"]}, plan="b")
        + Rules.of({"embed": "fsdp"}, role="optimizer", plan="c")
        + Rules.of({"vocab": "tensor"}, plan="d")  # what was whole is no loss
    )
    notes = lint(
        rules,
        {("embed", "param"), ("mlp", "param"), ("vocab", "param")},
        {"tensor": 2, "pipe": 4, "data": 1},
    )
    assert notes == [
        "replaced: mlp -> data  [a]  by  mlp -> tensor  [b]",
        "never used: heads -> whole | tensor  [b]",
        "unreachable: what stands after 'whole' in heads -> whole | tensor  [b]",
        "never used: embed (optimizer) -> fsdp  [c]",
        "idle: no row names mesh axis 'pipe', so its 4 ways all do the same work",
    ]


def test_lint_knows_what_a_resolved_tree_used():
    tree = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
    rules = Rules.of({"embed": "fsdp", "mlp": "tensor", "vocab": "tensor"})
    mesh = MeshSpec(fsdp=2, tensor=2).abstract()
    resolved = resolve(tree, rules, mesh, axes={"w": ("embed", "mlp")})
    assert lint(rules, resolved.used) == ["never used: vocab -> tensor  [rules]"]


def test_a_row_hidden_by_one_of_its_role_is_not_called_used():
    rules = Rules.of({"embed": None}) + Rules.of({"embed": "fsdp"}, role="param")
    assert lint(rules, {("embed", "param")}) == ["never used: embed -> whole  [rules]"]
