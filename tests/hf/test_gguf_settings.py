"""Which keys of a GGUF file are compared, have no effect, or are refused by name."""

import re
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest

from clearhead.core.errors import BadValue
from clearhead.hf.gguf_settings import check_settings
from tests.hf.tiny_gguf import llama


def check(config, architecture="llama", **settings):
    """Check settings of a file without tensors; a key has two underscores for a dot."""
    settings = {key.replace("__", "."): value for key, value in settings.items()}
    fields = {"general.architecture": architecture, **settings}
    fields = {key: SimpleNamespace(contents=lambda x=value: x) for key, value in fields.items()}
    check_settings(Path("a.gguf"), SimpleNamespace(fields=fields), config)


def keys(group):
    """All keys of a class of the package gguf, of the architecture llama."""
    for value in vars(group).values():
        if isinstance(value, type):
            yield from keys(value)
        elif isinstance(value, str) and "." in value and value != group.__module__:
            yield value.format(arch="llama", id=0, name="tool", dense="dense_2")


# Keys with any value: they name tokens, describe the file, or are compared with tensors and tokens.
UNCHECKED = r"""general\..*|split\..*|tokenizer\.(chat_templates?(\.tool)?|huggingface\.json)
tokenizer\.ggml\.(model|pre|tokens|token_type|scores|merges|\w+_token_id|add_(bos_token|eos_token|space_prefix))
llama\.(context_length|pooling_type|tensor_data_layout|vocab_size|embedding_length)
llama\.(feed_forward_length|expert_feed_forward_length|expert_shared_feed_forward_length|ssm\.inner_size)
llama\.rope\.scaling\.(original_context_length|finetuned|yarn_beta_fast|yarn_beta_slow)"""


def test_every_key_of_llama_cpp_is_compared_or_refused_by_name():
    config = llama(7).config
    unchecked = re.compile(UNCHECKED.replace("\n", "|"))
    for key in keys(gguf.Keys):
        if unchecked.fullmatch(key):
            check(config, **{key: 0.37})
            continue
        with pytest.raises(BadValue, match=f"'a.gguf' has {re.escape(key)}=0.37, and trans"):
            check(config, **{key: 0.37})
    assert len({*keys(gguf.Keys)}) > 250


def test_neutral_values_and_those_of_the_configuration_are_accepted():
    check(
        llama(7).config, llama__rope__scaling__factor=1.0, llama__rope__scale_linear=0.0,
        llama__rope__scaling__attn_factor=1.0, llama__rope__scaling__type="linear",
        llama__rope__dimension_count=8, llama__rope__freq_base=10000.0, llama__expert_count=0,
        llama__attention__sliding_window=0, llama__attention__head_count_kv=[2, 2],
        llama__attn_logit_softcapping=0.0, llama__attention__scale=8**-0.5,
        mradermacher__quantized_by="mradermacher", tokenizer__ggml__add_sep_token=False,
    )  # fmt: skip


def test_settings_that_a_file_lacks_have_the_defaults_of_llama_cpp():
    import transformers

    with pytest.raises(BadValue, match=r"sliding_window=0 \(llama.cpp's default\)"):
        check(transformers.MistralConfig())
    part = transformers.StableLmConfig(hidden_size=64, num_attention_heads=2)
    with pytest.raises(BadValue, match=r"dimension_count=32 .*reads it as 8"):
        check(part, "stablelm")
    check(part, "stablelm", stablelm__rope__dimension_count=8)
    with pytest.raises(BadValue, match="freq_base=10000"):
        check(llama(7, rope_parameters={"rope_type": "default", "rope_theta": 500.0}).config)


def test_the_pattern_of_windows_is_compared():
    import transformers

    config = transformers.Gemma3TextConfig(num_hidden_layers=2, sliding_window=512)
    window = {"gemma3__attention__sliding_window": 512}
    full = config.rope_parameters["full_attention"]["rope_theta"]
    window |= {"gemma3__rope__freq_base": full, "gemma3__rope__freq_base_swa": 10000.0}
    for pattern in (6, [True, True]):
        check(config, "gemma3", **window, gemma3__attention__sliding_window_pattern=pattern)
    for pattern in (2, 1, [True, False]):
        with pytest.raises(BadValue, match="sliding_window_pattern="):
            check(config, "gemma3", **window, gemma3__attention__sliding_window_pattern=pattern)
