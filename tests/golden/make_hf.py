"""What `transformers` and PyTorch compute, for tests that have neither.

  python make_hf.py make FOLDER                 tiny random models and their results
  python make_hf.py run FOLDER                  the results of each of its folders,
                                                which have a model and tokens.npy

`make` wrote the folder hf beside this file. The long form of tests/hf calls `run` with
an interpreter that has both packages (the variable TRANSFORMERS_PYTHON).
"""

import argparse
import json
import pathlib

import numpy as np
import torch
import transformers

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama2": ("Llama", SIZES | {"num_key_value_heads": 4}),
    "llama3": (
        "Llama",
        SIZES | {"rope_theta": 500.0, "rope_scaling": LLAMA3, "head_dim": 8},
    ),
    "linear": (
        "Llama",
        SIZES
        | {
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "tie_word_embeddings": True,
        },
    ),
    "mistral": ("Mistral", SIZES | {"sliding_window": 32, "rope_theta": 1000.0}),
    "qwen2": ("Qwen2", SIZES | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 8, "rms_norm_eps": 1e-3}),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": 40,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        },
    ),
}
# Saved in several files with an index.
SHARDED = "qwen3"
RATE, STEPS = 1e-2, 5


def random_model(name: str, seed: int):
    """Returns a model in which every parameter makes a difference."""
    kind, settings = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = getattr(
        transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    )(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, x in model.named_parameters():
            is_norm = "norm" in path or "ln_" in path
            x.normal_(float(is_norm and path.endswith("weight")), 0.2, generator=random)
    return model


def results(model, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the logits of tokens, and the losses of training steps on them."""
    tokens = tokens.astype(np.int64)
    inputs, targets = torch.tensor(tokens[:, :-1]), torch.tensor(tokens[:, 1:])
    model = model.float().eval().requires_grad_(True)
    with torch.no_grad():
        logits = model(inputs).logits.numpy()
    update = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    losses = []
    for _ in range(STEPS):
        found = model(inputs).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(found, targets.flatten())
        update.zero_grad()
        loss.backward()
        update.step()
        losses.append(loss.item())
    return {"logits": logits, "losses": np.array(losses, np.float32)}


def make(folder: pathlib.Path) -> None:
    for seed, name in enumerate(MODELS):
        model = random_model(name, seed)
        limit = "8KB" if name == SHARDED else "1GB"
        model.save_pretrained(folder / name, max_shard_size=limit)
        (folder / name / "generation_config.json").unlink(missing_ok=True)
        tokens = np.random.default_rng(seed).integers(0, 40, (1, 25))
        found = results(model, tokens)
        np.savez_compressed(folder / name / "expected.npz", tokens=tokens, **found)
    about = {"transformers": transformers.__version__, "torch": torch.__version__}
    (folder / "made_with.json").write_text(json.dumps(about) + "\n")


def run(folder: pathlib.Path) -> None:
    for own in sorted(path.parent for path in folder.glob("*/tokens.npy")):
        model = transformers.AutoModelForCausalLM.from_pretrained(own / "model")
        if (own / "adapter").exists():
            import peft

            model = peft.PeftModel.from_pretrained(model, own / "adapter")
            model = model.merge_and_unload()
        np.savez(own / "found.npz", **results(model, np.load(own / "tokens.npy")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    actions = parser.add_subparsers(required=True)
    for name, action in (("make", make), ("run", run)):
        own = actions.add_parser(name)
        own.add_argument("folder", type=pathlib.Path)
        own.set_defaults(run=action)
    args = parser.parse_args()
    torch.manual_seed(0)
    args.run(args.folder)


if __name__ == "__main__":
    main()
