"""Check that transformers reads the settings and numbers of a GGUF file as llama.cpp does."""

from math import isclose
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.errors import BadValue

ORIGINAL = "load the original checkpoint, a folder with config.json and safetensors."

# Keys of these namespaces describe the file; llama.cpp computes nothing from them.
_DESCRIPTIONS = ("GGUF.", "general.", "split.", "quantize.imatrix.", "mradermacher.")
_TOKENIZER = {
    "chat_template", "chat_templates", "huggingface.json", "ggml.model", "ggml.pre", "ggml.tokens",
    "ggml.token_type", "ggml.scores", "ggml.merges", "ggml.add_space_prefix", "ggml.add_bos_token",
    "ggml.add_eos_token", *(f"ggml.{name}_token_id" for name in (
        "bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", "cls", "prefix",
        "suffix", "middle", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep",
    )),
}  # fmt: skip
# Settings of an architecture that change no number, or have no effect without another one that is
# refused; and sizes of tensors, which transformers compares.
_WITHOUT_EFFECT = {
    "context_length", "pooling_type", "tensor_data_layout", "rope.scaling.original_context_length",
    "rope.scaling.finetuned", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "vocab_size", "embedding_length", "feed_forward_length", "expert_feed_forward_length",
    "expert_shared_feed_forward_length", "ssm.inner_size",
}  # fmt: skip
# The names of other settings in configurations; an architecture has one of them, or none.
_NAMES = {
    "block_count": "num_hidden_layers",
    "decoder_block_count": "num_decoder_layers",
    "decoder_start_token_id": "decoder_start_token_id",
    "use_parallel_residual": "use_parallel_residual",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads num_attention_heads",
    "attention.layer_norm_epsilon": "layer_norm_epsilon layer_norm_eps norm_epsilon norm_eps",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps layer_norm_epsilon",
    "attention.relative_buckets_count": "relative_attention_num_buckets",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_local_experts num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_weights_norm": "norm_topk_prob",
    "shortconv.l_cache": "conv_L_cache",
    "ssm.conv_kernel": "conv_kernel linear_conv_kernel_dim",
    "ssm.state_size": "state_size linear_key_head_dim",
    "ssm.time_step_rank": "time_step_rank linear_num_value_heads",
    "ssm.group_count": "linear_num_key_heads",
}
# transformers does not read these, and computes as llama.cpp does with one of these values.
_NEUTRAL = {
    setting: values
    for settings, values in (
        ("attention.causal", (True,)),
        ("rope.scaling.attn_factor rope.scaling.yarn_attn_factor", (1,)),
        ("rope.scaling.yarn_ext_factor", (-1, 0)),
        ("rope.scaling.factor rope.scale_linear expert_weights_scale", (0, 1)),
        ("logit_scale residual_scale embedding_scale", (0, 1)),
        ("attention.clamp_kqv attention.max_alibi_bias attention.shared_kv_layers", (0,)),
        ("expert_shared_count expert_group_count expert_group_used_count", (0,)),
        ("router_logit_softcapping leading_dense_block_count nextn_predict_layers", (0,)),
        ("rope.scaling.yarn_log_multiplier swin_norm ssm.dt_b_c_rms", (0,)),
        ("tokenizer.ggml.add_sep_token tokenizer.ggml.remove_extra_whitespaces", (0,)),
    )
    for setting in settings.split()
}


def check_settings(file: Path, reader: Any, config: Any) -> None:
    """Raise `BadValue` for a key that changes numbers, unless transformers reads it as llama.cpp.

    A key that is not listed here is refused. A setting that the file lacks has llama.cpp's default.
    """
    architecture = reader.fields["general.architecture"].contents()
    known = _known(config)
    values = _defaults(architecture, config)
    for key, field in reader.fields.items():
        group, _, name = key.partition(".")
        if group == architecture and name not in _WITHOUT_EFFECT:
            values[name] = field.contents()
        elif group == "tokenizer" and (name in _TOKENIZER or name.startswith("chat_template.")):
            continue
        elif group != architecture and not key.startswith(_DESCRIPTIONS):
            values[key] = field.contents()
    for name, value in values.items():
        key = name if name in reader.fields else f"{architecture}.{name}"
        if name not in known or not _agrees(value, known[name]):
            default = "" if key in reader.fields else " (llama.cpp's default)"
            raise misread(file, key, f"{str(value)[:80]}{default}", known.get(name))


def _defaults(architecture: str, config: Any) -> dict[str, Any]:
    """Return what llama.cpp takes for settings that a file may lack."""
    wanted: dict[str, Any] = {"attention.sliding_window": 4096 * (architecture == "gemma2")}
    if getattr(config, "rope_parameters", None):
        wanted |= {"rope.freq_base": 10000.0, "rope.dimension_count": _head_size(config)}
    return wanted


def _head_size(config: Any) -> int:
    heads = getattr(config, "num_attention_heads", None) or 1
    return int(getattr(config, "head_dim", None) or config.hidden_size // heads)


def _known(config: Any) -> dict[str, Any]:
    """Return the value of each setting in a configuration; a tuple if any of several agrees."""
    known: dict[str, Any] = dict(_NEUTRAL)
    for setting, names in _NAMES.items():
        known[setting] = next((getattr(config, x) for x in names.split() if hasattr(config, x)), 0)
    size = _head_size(config)
    known["attention.key_length"] = known["attention.value_length"] = size
    known["attention.scale"] = (0, size**-0.5)
    sigmoid = getattr(config, "scoring_func", None) == "sigmoid"
    known["expert_gating_func"] = 2 if sigmoid else (0, 1)
    if layers := getattr(config, "layer_types", None):
        known["attention.sliding_window_pattern"] = [x == "sliding_attention" for x in layers]
        known["full_attention_interval"] = [x != "full_attention" for x in layers]
    rotations = getattr(config, "rope_parameters", None) or {}
    # a configuration has one base of rotations, or one for each kind of layer
    full = rotations.get("full_attention", rotations)
    if full.get("rope_type", "default") == "default":
        known["rope.scaling.type"] = ("none", "linear")
    known["rope.freq_base"] = full.get("rope_theta")
    known["rope.freq_base_swa"] = rotations.get("sliding_attention", full).get("rope_theta")
    known["rope.dimension_sections"] = [*full.get("mrope_section", ()), 0, 0, 0, 0][:4]
    part = full.get("partial_rotary_factor") or 1.0
    known["rope.dimension_count"] = getattr(config, "rotary_dim", None) or int(size * part)
    return known


def _agrees(value: Any, known: Any) -> bool:
    """Return whether a value of a file is the known one, or one of several."""
    if isinstance(known, tuple):
        return any(_agrees(value, neutral) for neutral in known)
    if isinstance(known, list) and not isinstance(value, list):  # every n-th layer is a full one
        return known == [not value or bool(i % value) for i in range(1, len(known) + 1)]
    if isinstance(known, list):
        return known == value
    if isinstance(value, list):  # for each layer, with 0 where it has no attention
        return all(_agrees(x, known) for x in value if x)
    if not value or not known or isinstance(value, str) or isinstance(known, str):
        return bool(value == known or not (value or known))
    return isclose(known, value, rel_tol=1e-6)


def scale_queries(config: Any) -> None:
    """Write the scale of the scores of a Gemma 2 or 3, which its GGUF file lacks.

    transformers takes 256, the size of most of its heads. llama.cpp takes the head dimension, and
    the width of a head's part of the embedding for the model of 27B.
    """
    if hasattr(config, "query_pre_attn_scalar"):
        is_27b = config.num_hidden_layers in (46, 62)
        width = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = width if is_27b else config.head_dim


def scale_rotations(file: Path, reader: Any, config: Any) -> None:
    """Add the factors of `rope_freqs.weight` to the configuration.

    Llama 3.1 and later divide their rotary frequencies by them, and transformers ignores that
    tensor. Raises `BadValue` for factors that transformers' rule "llama3" cannot express.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = [tensor for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
    if not factors:
        return
    wanted = torch.tensor(factors[0].data, dtype=torch.float32)
    plain = dict(config.rope_parameters)
    angles = torch.arange(0, 2 * len(wanted), 2) / (2 * len(wanted))
    # llama.cpp computes the factors with these three, for any configuration
    config.rope_parameters = {
        **plain, "rope_type": "llama3", "factor": float(wanted.max()), "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    if not torch.allclose(plain["rope_theta"] ** -angles / frequencies, wanted, rtol=1e-4):
        raise misread(file, "rope_freqs.weight", "other factors", "the rule llama3")


def check_numbers(file: Path, reader: Any, model: nn.Module, loaded: dict[str, Any]) -> None:
    """Raise `BadValue` if a parameter is missing in the file or has another size, or a tensor of
    the file is unused.

    transformers draws the first two at random and ignores the third, without a warning.
    """
    if loaded["mismatched_keys"]:
        name, stored, expected = min(loaded["mismatched_keys"])
        raise unreadable(file, f"{name} is {tuple(stored)}, and {tuple(expected)} by its settings")
    if missing := loaded["missing_keys"]:
        raise unreadable(file, f"it lacks {', '.join(sorted(missing)[:5])}")
    tied = getattr(model.config, "tie_word_embeddings", False)
    apart = {"rope_freqs.weight", *(["output.weight"] if tied else [])}
    tensors = {t.name: int(t.n_elements) for t in reader.tensors if t.name not in apart}
    numbers = sum(parameter.numel() for parameter in model.parameters())
    if (left := sum(tensors.values()) - numbers) != 0:
        suspects = [name for name, size in tensors.items() if size == left]
        named = f" ({', '.join(suspects[:3])}?)" if suspects else ""
        raise unreadable(file, f"transformers reads {numbers:,} numbers, {left:,} fewer{named}")


def misread(file: Path, key: str, value: object, known: object) -> BadValue:
    unread = known is None or isinstance(known, tuple)
    reads = "does not read it" if unread else f"reads it as {known}"
    gave = f"{str(file)!r} has {key}={value}, and transformers {reads}."
    rule = "each setting of a GGUF file is applied, or the file is refused."
    return BadValue(gave, rule, ORIGINAL)


def unreadable(file: Path, why: str) -> BadValue:
    gave = f"The GGUF file {str(file)!r} cannot be loaded: {why}."
    rule = "transformers must be able to read a GGUF file, and all of its numbers are used."
    return BadValue(gave, rule, ORIGINAL)
