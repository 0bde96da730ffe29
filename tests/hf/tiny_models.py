"""For each kind of the installed transformers, a tiny model with random weights and inputs that it
reads. Both are found by trying, so not for every kind."""

import copy
import inspect
import re
from collections.abc import Iterator

import torch

import clearhead as ch

SIZES = {
    32: "hidden_size d_model n_embd dim embed_dim encoder_embed_dim decoder_embed_dim model_dim "
    "embedding_size moe_intermediate_size shared_expert_intermediate_size projection_dim "
    "moe_shared_expert_intermediate_size out_hidden_size qformer_hidden_size encoder_hidden_size "
    "cross_attention_hidden_size max_source_positions image_size",
    64: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim mlp_dim "
    "ffn_hidden_size max_target_positions",
    8: "head_dim d_kv d_head attention_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim "
    "swa_head_dim global_head_dim index_head_dim linear_key_head_dim linear_value_head_dim "
    "patch_size num_mel_bins mamba_d_state attention_window relative_attention_num_buckets",
    16: "kv_lora_rank q_lora_rank o_lora_rank index_topk qk_head_dim num_buckets mamba_d_head "
    "num_conv_pos_embeddings",
    4: "num_experts num_local_experts n_routed_experts moe_num_experts mamba_n_heads",
    2: "index_n_heads num_experts_per_tok moe_k moe_topk eos_token_id mamba_expand "
    "num_conv_pos_embedding_groups full_attention_interval",
    1: "n_group topk_group first_k_dense_replace n_shared_experts temporal_patch_size "
    "spatial_merge_size bos_token_id decoder_start_token_id",
    99: "vocab_size text_vocab_size",
    128: "max_position_embeddings n_positions",
    5: "sliding_window sliding_window_size num_queries",
    0: "pad_token_id",
    95: "image_token_id image_token_index",
    96: "audio_token_id audio_token_index",
    94: "video_token_id",
    93: "vision_start_token_id",
    92: "vision_end_token_id",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
HEADS = re.compile(r"(.*num_.*heads?|n_heads?|.*attention_heads)$")
LAYERS = re.compile(r"(num_.*layers|n_layers?|.*_layers|depth|num_blocks)$")
DERIVED = {  # from the sizes, or about other things than the model
    "layer_types", "mlp_layer_types", "per_layer_config", "dtype", "transformers_version",
    "id2label", "label2id", "architectures", "forced_eos_token_id", "forced_bos_token_id",
    "suppress_tokens", "begin_suppress_tokens", "problem_type", "_name_or_path",
    "output_attentions",
}  # fmt: skip
MOST_PARAMETERS = 60_000_000


class NotBuilt(Exception):
    """No tiny model of a kind, or no inputs that it reads."""


def tiny_config(kind: str, key_heads: int):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[kind](**_shrunk(CONFIG_MAPPING[kind]().to_dict(), key_heads))


def _shrunk(settings: dict, key_heads: int) -> dict:
    small = {}
    for name, value in settings.items():
        if name in DERIVED:
            continue
        if name in ("rope_scaling", "rope_parameters") and isinstance(value, dict):
            if not any(isinstance(x, dict) for x in value.values()):
                value = {"rope_theta": value.get("rope_theta", 1e4), "rope_type": "default"}
        elif isinstance(value, dict):
            value = _shrunk(value, key_heads)
        elif type(value) is float and "drop" in name:
            value = 0.0
        elif type(value) is int:
            value = _small(name, value, key_heads)
        small[name] = value
    return small


def _small(name: str, value: int, key_heads: int) -> int:
    if name in SMALL:
        return SMALL[name]
    if "kv_heads" in name or "key_value_heads" in name:
        return key_heads if value else value
    if HEADS.search(name):
        return 4 if value > 1 else value
    if LAYERS.search(name):
        return min(value, 2)
    return 3 if name.endswith("_token_id") and value > 98 else value


def build(config, implementation: str):
    import transformers
    from transformers.models.auto import modeling_auto

    autos = [transformers.AutoModel, *vars(modeling_auto).values()]
    autos = [x for x in autos if isinstance(x, type) and hasattr(x, "from_config")]
    auto = next((x for x in autos if type(config) in (x._model_mapping or ())), autos[0])
    torch.manual_seed(0)
    return auto.from_config(copy.deepcopy(config), attn_implementation=implementation).eval()


def drawn_model(config, auto="AutoModelForCausalLM"):
    """A model on clearhead with weights from a seed, also those that start at 0 or 1."""
    import transformers

    ch.hf.register()
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(config, attn_implementation="clearhead").eval()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn_like(x) * 0.2)
    return model


def tiny_model(kind: str):
    """The configuration, the inputs, and the output of the model with eager attention."""
    why = "it has no configuration of its own"
    for key_heads in (2, 4):
        try:
            config = tiny_config(kind, key_heads)
            with torch.device("meta"):
                parameters = sum(p.numel() for p in build(config, "eager").parameters())
            if parameters > MOST_PARAMETERS:
                raise NotBuilt(f"{kind}: {parameters} parameters")
            model = build(config, "eager")
        except Exception as error:
            why = repr(error)
            continue
        for inputs in _inputs(config, model):
            try:
                with torch.no_grad():
                    return config, inputs, model(**inputs)
            except Exception as error:
                why = repr(error)
    raise NotBuilt(f"{kind}: {why[:200]}")


def _inputs(config, model) -> Iterator[dict]:
    """Inputs worth a try, by the names of the arguments of the model."""
    names = {*inspect.signature(model.forward).parameters}
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int):
        return torch.randn(*shape, generator=generator)

    ids = torch.randint(4, 90, (2, 11), generator=generator)
    decoder = {"decoder_input_ids": ids[:, :7]} if "decoder_input_ids" in names else {}
    no_cache = {"use_cache": False} if "use_cache" in names else {}
    parts = [config, *(x for x in vars(config).values() if hasattr(x, "to_dict"))]
    sides = {x.image_size for x in parts if type(getattr(x, "image_size", None)) is int}
    if "input_ids" in names:
        yield {"input_ids": ids, **decoder, **no_cache}
    if "pixel_values" in names:
        for side in (*sides, 64, 224):
            yield {"pixel_values": noise(2, 3, side, side), **decoder}
            if "input_ids" in names:
                text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                yield {"pixel_values": noise(2, 3, side, side), **text}
        frames = getattr(config, "num_frames", 2)
        yield {"pixel_values": noise(1, frames, 3, 32, 32)}
    if "pixel_values_videos" in names:
        yield {"pixel_values_videos": noise(1, getattr(config, "num_frames", 2), 3, 32, 32)}
    mels = [getattr(x, n, None) for x in parts for n in ("num_mel_bins", "input_feat_per_channel")]
    mel = next((x for x in mels if type(x) is int), 80)
    for shape in ((1, mel, 64), (1, 64, mel), (1, mel, 3000)):
        if "input_features" in names:
            yield {"input_features": noise(*shape), **decoder}
    for shape in ((1, 4000), (1, 1, 4000), (1, 1024, 128)):
        if "input_values" in names:
            yield {"input_values": noise(*shape), **decoder}
    if "past_values" in names:
        channels = getattr(config, "num_input_channels", 1)
        yield {"past_values": noise(2, getattr(config, "context_length", 32), channels)}
    for name in ("inputs_embeds", "hidden_states"):
        if name in names:
            yield {name: noise(1, 11, 32)}


def numbers(output) -> list[torch.Tensor]:
    """The tensors of real numbers in an output."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if hasattr(output, "items"):
        output = [*output.values()]
    return [x for part in output for x in numbers(part)] if isinstance(output, list | tuple) else []
