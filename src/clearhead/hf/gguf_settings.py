"""Check that transformers reads the settings and numbers of a GGUF file as llama.cpp does."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import BadValue

# Settings that transformers does not read for each architecture, with the configuration's names.
_SETTINGS = {
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
}


def check_settings(file: Path, reader: Any, config: Any) -> None:
    """Raise `BadValue` for a setting that differs between the configuration and the file."""
    rotations = getattr(config, "rope_parameters", None) or {}
    # a configuration has one base of rotations, or one for each kind of layer
    bases = [x.get("rope_theta") for x in rotations.values() if isinstance(x, dict)]
    for key, field in reader.fields.items():
        setting = key.partition(".")[2]
        if setting == "rope.scaling.type" and field.contents() != "none":
            raise misread(file, key, field.contents(), rotations.get("rope_type", "none"))
        if (name := _SETTINGS.get(setting)) is None or key.startswith("general."):
            continue
        known = rotations.get(name, getattr(config, name, None))
        if name == "rope_theta" and field.contents() in bases:
            continue
        if name == "head_dim" and known is None:
            known = config.hidden_size // config.num_attention_heads
        value = field.contents()
        if known is None or abs(float(known) - float(value)) > 1e-6 * abs(float(value)):
            raise misread(file, key, value, known)


def scale_queries(config: Any) -> None:
    """Write the scale of the scores of a Gemma 2 or 3, which its GGUF file lacks.

    transformers takes 256, the size of most of its heads. llama.cpp takes the head size, and the
    width of a head's part of the embedding for the model of 27B.
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


def check_numbers(file: Path, reader: Any, model: nn.Module, missing: set[str]) -> None:
    """Raise `BadValue` if a parameter is missing in the file, or a tensor of the file is unused.

    transformers draws the first at random and ignores the second, without a warning.
    """
    if missing:
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
    return BadValue(
        f"{str(file)!r} has {key}={value}, and transformers reads it as {known}.",
        "each setting of a GGUF file is applied, or the file is refused.",
        "load the original checkpoint, a folder with config.json and safetensors.",
    )


def unreadable(file: Path, why: str) -> BadValue:
    return BadValue(
        f"The GGUF file {str(file)!r} cannot be loaded: {why}.",
        "transformers must be able to read a GGUF file, and all of its numbers are used.",
        "load the original checkpoint, a folder with config.json and safetensors.",
    )
