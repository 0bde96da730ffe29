"""Tiny random transformers models, of several architectures of each kind."""

from functools import lru_cache

import torch
import transformers

import clearhead as ch

WORDS, HEADS, WINDOW = 41, 4, 4
PADDING = 0  # its id
SIZES = dict(vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=HEADS)
GROUPED = dict(SIZES, num_key_value_heads=2, intermediate_size=17, pad_token_id=PADDING)
PLAIN = dict(SIZES, intermediate_size=17, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
IMAGE = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=17,
             image_size=6, patch_size=2, num_labels=5)  # fmt: skip
GPT2 = dict(vocab_size=WORDS, n_embd=16, n_layer=2, n_head=HEADS, n_positions=32, bos_token_id=1,
            eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
T5 = dict(vocab_size=WORDS, d_model=16, d_kv=4, d_ff=17, num_layers=2, num_heads=HEADS,
          dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=PADDING)  # fmt: skip
BART = dict(vocab_size=WORDS, d_model=16, encoder_layers=2, decoder_layers=2, dropout=0.0,
            encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=17,
            decoder_ffn_dim=17, max_position_embeddings=32, pad_token_id=PADDING,
            decoder_start_token_id=2, forced_eos_token_id=None)  # fmt: skip

# kind, class of transformers, its configuration
MODELS = {
    "gpt2": ("decoder", "GPT2LMHeadModel", GPT2),
    "llama": ("decoder", "LlamaForCausalLM", GROUPED),
    "mistral": ("decoder", "MistralForCausalLM", dict(GROUPED, sliding_window=WINDOW)),
    "gemma2": (
        "decoder",
        "Gemma2ForCausalLM",
        dict(GROUPED, head_dim=4, sliding_window=WINDOW, attn_logit_softcapping=2.0),
    ),
    "bert": ("encoder", "BertForMaskedLM", PLAIN),
    "roberta": ("encoder", "RobertaForMaskedLM", dict(PLAIN, pad_token_id=PADDING)),
    "t5": ("encoder-decoder", "T5ForConditionalGeneration", T5),
    "bart": ("encoder-decoder", "BartForConditionalGeneration", BART),
    "vit": ("vision", "ViTForImageClassification", IMAGE),
    "dinov2": ("vision", "Dinov2ForImageClassification", IMAGE),
}
KINDS = ["decoder", "encoder", "encoder-decoder", "vision"]
KIND = {name: kind for name, (kind, _, _) in MODELS.items()}


def layers_of(name: str) -> int:
    """How many layers call attention: an encoder-decoder's decoder has two for each of its own."""
    return 6 if KIND[name] == "encoder-decoder" else 2


@lru_cache
def build(name: str) -> transformers.PreTrainedModel:
    """The model, with weights that make attention far from uniform. Nothing drops out."""
    ch.hf.register()
    _, class_name, config = MODELS[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = model_class._from_config(
        model_class.config_class(**config), attn_implementation="clearhead"
    ).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0.0, 0.4)
    return model
