"""The families of models: which settings of ours a config.json has, and which not.

A family is a row of a table. What a row does not know, in a config.json or in a model
of ours, is refused by name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...models.transformer import Config

# Without effect on what a model computes.
IGNORED = frozenset(
    "_attn_implementation _name_or_path architectures attn_implementation "
    "bos_token_id chunk_size_feed_forward do_sample dtype eos_token_id id2label "
    "initializer_range is_decoder is_encoder_decoder label2id max_length "
    "max_window_layers temperature top_k top_p "
    "model_type output_attentions output_hidden_states pad_token_id "
    "problem_type reorder_and_upcast_attn return_dict return_dict_in_generate "
    "sep_token_id task_specific_params "
    "tokenizer_class torch_dtype transformers_version unk_token_id use_cache".split()
)
# Probabilities of dropout, which the models here do not have.
DROPOUTS = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
# Known, but not what a row below describes.
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How one model_type of Hugging Face is described here.

    Attributes:
      fields: setting of `Config` -> name in config.json.
      defaults: value of a name that a config.json may lack; the others are required.
      fixed: name in config.json -> the only values that are known, None for any; it may
        be absent.
      settings: what `Config` has for every model of the family.
      windows: what a config.json may say about windows of attention, with the values
        of those it lacks.
      stem: the prefix of names of tensors, but of the head's.
    """

    model_type: str
    architecture: str
    fields: Mapping[str, str]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, tuple[Any, ...] | None]
    settings: Mapping[str, Any]
    windows: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stem: str = "model."

    @property
    def has_rope(self) -> bool:
        return self.settings["positions"] == "rotary"

    @property
    def known(self) -> frozenset[str]:
        """The names in a config.json that are read or make no difference."""
        own = {*self.fields.values(), *self.fixed, *DROPOUTS, *self.windows}
        return IGNORED | own | (set(ROPE) if self.has_rope else set())

    def fits(self, model: Config) -> bool:
        return all(getattr(model, k) == v for k, v in self.settings.items())


FIELDS = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "d_ff": "intermediate_size",
    "max_length": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "tied_head": "tie_word_embeddings",
}
DEFAULTS = {
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
FIXED = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "pretraining_tp": (1,),  # splits products, for nothing but rounding
}
SETTINGS = {
    "norm": "rms",
    "positions": "rotary",
    "mlp": "swiglu",
    "use_bias": False,
    "qkv_bias": False,
    "qk_norm": False,
}

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=FIELDS,
    defaults=DEFAULTS | {"num_key_value_heads": None},
    fixed=FIXED,
    settings=SETTINGS,
)
MISTRAL = dataclasses.replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults=DEFAULTS,
    windows={"sliding_window": 4096, "layer_types": None},
)
QWEN2 = dataclasses.replace(
    MISTRAL,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    settings=SETTINGS | {"qkv_bias": True},
    windows={**MISTRAL.windows, "use_sliding_window": False},
)
QWEN3 = dataclasses.replace(
    QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults=DEFAULTS | {"head_dim": 128},
    settings=SETTINGS | {"qk_norm": True},
)
GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    fields={
        "vocab_size": "vocab_size",
        "num_layers": "n_layer",
        "d_model": "n_embd",
        "num_heads": "n_head",
        "d_ff": "n_inner",
        "max_length": "n_positions",
        "norm_epsilon": "layer_norm_epsilon",
        "tied_head": "tie_word_embeddings",
    },
    defaults={
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    fixed={
        # Both are GELU approximated with a tanh.
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "add_cross_attention": (False,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "n_ctx": None,
        # Of a head that classifies.
        **dict.fromkeys(
            (
                *("summary_activation", "summary_first_dropout", "summary_type"),
                *("summary_proj_to_labels", "summary_use_proj"),
            )
        ),
    },
    settings={
        "norm": "layer",
        "positions": "learned",
        "mlp": "gelu",
        "use_bias": True,
        "qkv_bias": False,
        "qk_norm": False,
    },
    stem="transformer.",
)
# The first that fits is the one that a model is exported as.
FAMILIES = {f.model_type: f for f in (LLAMA, GPT2, QWEN2, QWEN3, MISTRAL)}


def find(model_type: str | None, where: str) -> Family:
    """Returns the family of a model_type, or raises ValueError."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    why = f"{where}: model_type {model_type!r} is not known"
    if model_type in EXPERTS:
        why = f"{where}: model_type {model_type!r} has experts, which are not known"
    raise ValueError(f"{why}; known are {', '.join(FAMILIES)}")


def family_of(model: Config) -> Family:
    """Returns the family that a model of ours is exported as, or raises ValueError."""
    for family in FAMILIES.values():
        if family.fits(model):
            return family
    own = ", ".join(f"{name}={getattr(model, name)!r}" for name in SETTINGS)
    raise ValueError(
        f"no family of Hugging Face has a model with {own}; known are "
        f"{', '.join(FAMILIES)} (docs/huggingface.md lists their settings)"
    )
