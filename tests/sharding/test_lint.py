import jax
import pytest

from meshloom.models import transformer
from meshloom.sharding import MeshSpec, Rules, data, fsdp, lint, resolve, tensor

RULES = data() + fsdp() + tensor()
TREE = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
AXES = {"w": ("embed", "mlp")}
MESH = MeshSpec(fsdp=2, tensor=2).abstract()


def test_a_normal_model_has_no_lint():
    model = transformer.Config(
        vocab_size=64, num_layers=2, d_model=32, num_heads=4, d_ff=64, max_length=16
    )
    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    layout = resolve(params, RULES, MESH, axes=model.axes())
    assert lint(RULES, layout.used, layout.mesh) == []
    layout = resolve(TREE, RULES, MESH, axes=AXES)
    assert lint(RULES, layout.used, layout.mesh) == []


def test_rows_without_effect_are_reported():
    rules = (
        Rules.of({"embed": None, "mlp": "data", "vocab": None}, plan="a")
        + Rules.of({"mlp": "tensor", "heads": [None, "tensor"]}, plan="b")
        + Rules.of({"embed": "fsdp"}, role="optimizer", plan="c")
        + Rules.of(
            {"vocab": "tensor"}, plan="d"
        )  # sharding what was replicated is not reported
    )
    notes = lint(
        rules,
        {("embed", "param"), ("mlp", "param"), ("vocab", "param")},
        {"tensor": 2, "pipe": 4, "data": 1},
    )
    assert notes == [
        "replaced: mlp -> data  [a]  by  mlp -> tensor  [b]",
        "never used: heads -> replicated | tensor  [b]",
        "unreachable: the candidates after 'replicated' in heads -> replicated | "
        "tensor  [b]",
        "idle: no row names mesh axis 'pipe', so its 4 ways duplicate work",
    ]


def test_a_misspelled_row_is_reported_with_a_suggestion():
    rules = RULES + Rules.of({"mpl": "tensor"}, plan="mine")
    layout = resolve(TREE, rules, MESH, axes=AXES)
    assert lint(rules, layout.used) == [
        "never used: mpl -> tensor  [mine]  (did you mean 'mlp'?)"
    ]
    assert lint(rules, layout.used | {("mpl", "compute")}) == []


@pytest.mark.parametrize(
    ("role", "resolved", "reported"),
    [
        ("optimizer", ("param",), False),  # nothing was resolved for that role
        ("optimizer", ("param", "optimizer"), True),
        (None, ("param",), True),
    ],
)
def test_rows_are_checked_only_in_roles_that_were_resolved(role, resolved, reported):
    rules = RULES + Rules.of({"experts": "expert"}, role=role, plan="mine")
    used = set()
    for name in resolved:
        used |= resolve(TREE, rules, MESH, axes=AXES, role=name).used
    assert [n.split(":")[0] for n in lint(rules, used)] == ["never used"] * reported


def test_a_row_overridden_in_every_role_is_reported():
    rules = Rules.of({"embed": None})
    for role in ("param", "compute"):
        rules += Rules.of({"embed": "fsdp"}, role=role)
    used = {("embed", "param")}
    assert lint(rules, used) == []  # the role optimizer was not resolved
    rules += Rules.of({"embed": "fsdp"}, role="optimizer")
    assert lint(rules, used) == ["never used: embed -> replicated  [rules]"]


def test_a_fused_dimension_uses_the_row_of_its_name():
    rules = RULES + Rules.of({"heads": "tensor"}, plan="mine")
    layout = resolve(TREE, rules, MESH, axes={"w": ("embed", "heads*2")})
    assert lint(rules, layout.used) == []
