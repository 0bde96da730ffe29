"""Names that architectures use for their parts, and in what one differs from all others.

This is the only list of such names. If clearhead refuses a new architecture, or misses a part of
it, the name that is missing belongs in one of these tables.
"""

# The last part of the name of the output projection, in lower case.
OUTPUT_PROJECTIONS = (
    "o_proj", "out_proj", "c_proj", "o", "wo", "w_o", "dense", "out_lin", "proj", "projection",
    "linear_out", "proj_out", "to_out", "output_projection", "output_proj", "attention_output",
    "projection_layer",
)  # fmt: skip
# Parts of the names of modules that change the output of attention before that projection.
CHANGE_OUTPUT = ("gate", "sub_norm", "o_norm", "inner_attn_ln", "groupnorm")
# Modules, and parameters of a layer, that multiply each feature of what attention writes.
SCALES = ("layer_scale1", "ls1", "self_attn_layer_scale")
SCALED_BY = ("lambda_1", "gamma_1")
DOUBLE_QUERIES = "q_proj"  # Qwen3-Next: of twice the width, its second half is a gate

# Modules that compute the queries, each with that of the keys beside it.
QUERIES_AND_KEYS = {
    "q_proj": "k_proj", "query": "key", "q": "k", "q_lin": "k_lin", "W_query": "W_key",
    "to_q": "to_k", "wq": "wk",
}  # fmt: skip
# Modules that compute queries, keys and values, one after the other (False), or group by group.
FUSED_PROJECTIONS = {"c_attn": False, "qkv_proj": False, "Wqkv": False, "query_key_value": True}

# Parts of names in the code of attention that may change queries and keys after their projections.
CHANGE_QUERIES_AND_KEYS = ("rot", "rope", "norm", "clip", "clamp", "kv_b_proj", "bias_u")
CHANGE_VALUES = ("v_norm", "clip", "clamp", "v_scale")

# Arguments that pass another text to a module, for cross-attention.
OTHER_TEXT = (
    "context", "memory", "key_value_states", "encoder_hidden_states", "cross_attention_states",
)  # fmt: skip
# Keywords without effect on attention: settings that are already applied (positions in queries and
# keys, a sliding window and a sequence index in the mask), inputs of the model, and options for its
# output. `max_length_*` follow from `cu_seq_lens_*`.
WITHOUT_EFFECT = {
    "position_ids", "cache_position", "sliding_window", "max_length_q", "max_length_k",
    "token_type_ids", "mm_token_type_ids", "decoder_input_ids", "pixel_values",
    "output_hidden_states", "logits_to_keep",
    "labels", "shift_labels", "num_items_in_batch", "ignore_index", "reduction",
}  # fmt: skip
# Parts of the names of inputs that a loss needs.
TARGETS = ("label", "start_positions", "end_positions")
# They call the attention interface, and also read their mask elsewhere, as an additive mask.
READ_MASKS = {"transformers.models.nllb_moe", "transformers.models.deepseek_v4"}

# Parameters that are tokens before the patches of an image, in timm, torchvision and transformers,
# in the order of these tokens.
BEFORE_PATCHES = {
    "[CLS]": ("cls_token", "class_token", "class_embedding"),
    "[DIST]": ("distillation_token", "dist_token"),
    "[REG]": ("register_tokens", "reg_token"),
}
# Image encoders of which TransformerLens has the blocks.
IMAGE_ENCODERS = ("SiglipVisionModel", "CLIPVisionModel")
