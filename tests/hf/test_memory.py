"""An import holds one tensor in host memory besides the parameters on its devices."""

import json
import subprocess
import sys

import numpy as np
from safetensors.numpy import save_file

from meshloom.trainer.hf import documents, families, tensors

MIB = 2**20
# In a process of its own, whose devices are in host memory: what it needs at most, over
# what it needed before, less the parameters.
PROGRAM = """
import pathlib, sys
import jax, numpy as np
from meshloom.trainer.hf import importing
from meshloom.trainer.run import trained

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith(name))

jax.config.update("jax_num_cpu_devices", 2)
mesh = trained.make_mesh("fsdp=2")
config = importing._config
source = importing.open_source(pathlib.Path(sys.argv[1]), dtype=None, pad_vocab_to=128)
for _ in range(2):  # the first compiles
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    params = importing._read(source, config(source.model, pathlib.Path("run")), mesh)
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    print(size, status("VmHWM") - before)
    del params
"""


def test_one_tensor_at_a_time(tmp_path):
    document = {
        "model_type": "llama",
        "vocab_size": 8191,
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 4096,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(document))
    family = families.find("llama", "config.json")
    model, _ = documents.read_model(document, family, "config.json")
    parts = tensors.pieces(model, family)
    found = {piece.name: np.ones(piece.shape, np.float32) for piece in parts}
    largest = max(x.nbytes for x in found.values())
    save_file(found, tmp_path / "model.safetensors")
    del found
    program = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    result = subprocess.run(program, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    for line in result.stdout.splitlines():
        size, peak = map(int, line.split())
        # One of our arrays of layers has 96 MiB, and compiling takes about 60.
        assert largest == 8191 * 512 * 4 and size > 20 * largest
        assert peak - size < 2 * largest + 64 * MIB, (peak - size) / MIB
