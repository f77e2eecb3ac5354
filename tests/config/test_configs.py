"""Tests of every shipped config by shapes alone, without data or devices."""

import pathlib
import shlex

import jax
import pytest

from meshloom.sharding import MeshSpec
from meshloom.trainer import cli
from meshloom.trainer.config import files as config_files
from meshloom.trainer.program import state
from meshloom.trainer.program.rules import make_rules
from meshloom.trainer.run import train

# As published, without any padding of the vocabulary.
PUBLISHED = {
    "gpt2_124m": 124_439_808,
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "deepseek_moe_16b": 16_375_728_128,
}
MESHES = {
    "digits": ["data=8", "fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2"],
    "digits_resnet": ["data=8", "fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2"],
    "digits_vit": ["data=8", "fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2"],
    "dlrm": ["data=8", "fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2"],
    "drill": ["data=8", "fsdp=4,tensor=2"],
    "factors": ["data=8", "data=2,tensor=4", "data=2,fsdp=2,tensor=2"],
    "two_towers": ["data=8", "fsdp=8", "fsdp=4,tensor=2", "data=2,fsdp=2,tensor=2"],
    "default": ["data=8", "fsdp=8", "data=2,fsdp=2,tensor=2", "fsdp=2,tensor=4"],
    "gpt2_124m": ["fsdp=8", "data=4,fsdp=4", "data=2,fsdp=2,tensor=4"],
    "llama2_7b": ["fsdp=64", "fsdp=16,tensor=4", "data=2,fsdp=16,tensor=2"],
    "llama3_8b": ["fsdp=64", "fsdp=16,tensor=4", "replica=2,fsdp=32"],
    "llama3_70b": ["fsdp=64,tensor=4", "fsdp=256", "replica=4,fsdp=32,tensor=8"],
    "moe": ["data=8", "expert=8", "fsdp=2,expert=2,tensor=2"],
    "mixtral_8x7b": ["fsdp=8,expert=8", "fsdp=16,expert=2,tensor=2"],
    "qwen3_30b_a3b": ["fsdp=8,expert=8", "fsdp=4,expert=8,tensor=2"],
    "deepseek_moe_16b": ["fsdp=8,expert=8", "fsdp=4,expert=8,tensor=2"],
}
EXAMPLES = {
    "digits": 38_282,
    "digits_resnet": 77_290,
    "digits_vit": 136_010,
    "factors": (1024 + 768) * 4,
    "two_towers": (1024 + 512) * 16 + 2 * (32 * 64 + 80) + 4 * 64,
    "dlrm": 1088 * 16 + 4 * 64 + 64 * 17 + 16 + 22 * 64 + 64 + 64 * 32 + 32 + 33,
}  # whose data is no text, and their parameters
# Also with the residual stream sharded by position, and both sides of a matrix sharded.
PLANS = ("data+fsdp+tensor", "data+fsdp+tensor+sequence", "data+tensor2d")


@pytest.fixture(scope="module")
def configs():
    names = config_files.shipped()
    return {name: config_files.load([name], root=train.Config).config for name in names}


def layout(config, mesh: str, plan: str):
    tx = config.optimizer.make(
        config.schedule.make(config.num_steps), config.model.axes()
    )
    rules = make_rules(plan, config.rules)
    return state.make_layout(config.model, tx, rules, MeshSpec.parse(mesh).abstract())


def test_each_shipped_config_is_tested_here(configs):
    assert set(configs) == set(MESHES)
    assert set(MESHES) == {"default", "drill", "moe", *EXAMPLES, *PUBLISHED}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(configs, name):
    assert configs[name].model.num_params() == PUBLISHED[name]


@pytest.mark.parametrize("name", MESHES)
def test_the_header_holds_a_command_that_runs_it(name):
    text = config_files.shipped()[name].read_text()
    header = text.split("from __gin__")[0].splitlines()
    command = next(line for line in header if line.startswith("#   meshloom train"))
    argv = shlex.split(command.removeprefix("#"))[1:]
    args = cli._parser().parse_args(argv)
    assert args.config == (None if name == "default" else [name])
    # The command in the header must load with exactly these flags.
    loaded = config_files.load([name], args.set, root=train.Config)
    if args.mesh:
        spec = MeshSpec.parse(args.mesh)
        config_files.override(loaded, "mesh", spec, "--mesh")
        assert args.mesh in MESHES[name]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "name, mesh", [(name, mesh) for name in MESHES for mesh in MESHES[name]]
)
def test_every_rule_resolves_and_nothing_large_is_replicated(configs, name, mesh, plan):
    config = configs[name]
    planned = layout(config, mesh, plan)
    num_params = sum(a.bytes for a in planned.params.arrays)
    spec = MeshSpec.parse(mesh)
    if spec.fsdp > 1 or spec.tensor > 1:  # plain data parallelism replicates weights
        for array in planned.params.replicated():
            assert array.bytes < 0.01 * num_params, array.path
    # AdamW has two arrays of each parameter's shape, sharded at least as much.
    moments = planned.opt_state.bytes_per_device
    assert moments <= 2 * planned.params.bytes_per_device + 64


@pytest.mark.parametrize("name", MESHES)
def test_every_batch_can_be_cut(configs, name):
    config = configs[name]
    assert config.batch_size % (config.num_microbatches or 1) == 0
    for mesh in MESHES[name]:
        spec = MeshSpec.parse(mesh)
        ways = spec.replica * spec.data * spec.fsdp * spec.expert
        assert config.batch_size % ways == 0, mesh


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_and_their_model_agree(configs, name):
    config = configs[name]
    split = config.data.open("train")
    batch = {name: x[None] for name, x in split[0].items()}
    config.model.check_batch(batch, split.describe())
    assert config.model.num_params() == EXAMPLES[name]
    if config.exchange is not None:
        assert config.num_steps % config.exchange.policy.local_steps == 0


@pytest.mark.parametrize("name", [name for name in MESHES if name not in EXAMPLES])
def test_data_and_model_agree(configs, name):
    config = configs[name]
    assert config.data.length <= config.model.max_length
    shape = (config.batch_size, config.data.length)
    batch = dict.fromkeys(("inputs", "targets"), jax.ShapeDtypeStruct(shape, "int32"))
    batch["weights"] = jax.ShapeDtypeStruct(shape, "float32")
    config.model.check_batch(batch, {"vocab_size": config.model.vocab_size})


def test_what_is_trained_on_a_cpu_computes_in_float32(configs):
    for name, config in configs.items():
        expected = "bfloat16" if name in PUBLISHED else "float32"
        found = getattr(config.model, "compute_dtype", "float32")
        assert found == expected, name


def test_configs_hold_gin_alone():
    folder = pathlib.Path(config_files.__file__).parents[2] / "configs"
    files = {f.name for f in folder.iterdir() if f.name != "__pycache__"}
    assert files == {"__init__.py", *(f"{name}.gin" for name in MESHES)}
    assert (folder / "__init__.py").read_text() == ""
