"""`why` on transformers models, against runs in float64 without one part, with norms frozen."""

import os

import pytest
import torch

import clearhead as ch
from clearhead.hf.projections import output_projection
from tests.hf.tiny_models import drawn_model

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="extra `hf` is not installed")

T, SOURCE = 7, 5
SMALL = dict(vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
SMALL |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
GROUPED = dict(**SMALL, num_key_value_heads=2, intermediate_size=37, head_dim=12)
WIDE = dict(**SMALL, num_key_value_heads=2, intermediate_size=37)
DECODER = dict(decoder_start_token_id=0, vocab_size=97, d_model=32, dropout=0.0)
CONFIGS = {  # and the layer that is split
    "gpt2": (transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=4), 2),
    "llama": (transformers.LlamaConfig(**GROUPED), 2),
    "qwen2": (transformers.Qwen2Config(**WIDE), 2),
    "qwen3": (transformers.Qwen3Config(**GROUPED), 2),
    "gemma2": (
        transformers.Gemma2Config(**GROUPED, sliding_window=5, attn_logit_softcapping=2.0), 2,
    ),
    "gemma3": (transformers.Gemma3TextConfig(**GROUPED, sliding_window=5), 2),
    "gpt_neox": (transformers.GPTNeoXConfig(**SMALL, intermediate_size=37, rotary_pct=0.5), 2),
    "phi": (transformers.PhiConfig(**SMALL, intermediate_size=37, partial_rotary_factor=0.5), 2),
    "olmo2": (transformers.Olmo2Config(**WIDE), 2),
    "opt": (
        transformers.OPTConfig(**SMALL, ffn_dim=37, word_embed_proj_dim=32, dropout=0.0), 2,
    ),
    "bert": (transformers.BertConfig(**SMALL, intermediate_size=37), 2),
    "albert": (transformers.AlbertConfig(**SMALL, embedding_size=32, intermediate_size=37), 2),
    "gpt_oss": (
        transformers.GptOssConfig(
            **(GROUPED | {"intermediate_size": 32}), num_local_experts=2, num_experts_per_tok=1
        ), 2,
    ),
    "deepseek": (
        transformers.DeepseekV3Config(
            **SMALL, intermediate_size=37, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=24,
            qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=11, first_k_dense_replace=3,
        ), 2,
    ),
    "t5": (
        transformers.T5Config(
            vocab_size=97, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4,
            decoder_start_token_id=0, dropout_rate=0.0,
        ), 4,
    ),
    "t5 crossing": (
        transformers.T5Config(
            vocab_size=97, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4,
            decoder_start_token_id=0, dropout_rate=0.0,
        ), 5,
    ),
    "marian crossing": (
        transformers.MarianConfig(
            **DECODER, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=37, decoder_ffn_dim=37, pad_token_id=96,
        ), 5,
    ),
}  # fmt: skip


def built(name):
    config, layer = CONFIGS[name]
    auto = "AutoModelForSeq2SeqLM" if getattr(config, "is_encoder_decoder", False) else None
    model = drawn_model(config, auto or ("AutoModel" if "bert" in name else "AutoModelForCausalLM"))
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randint(3, 90, (T,), generator=draw)
    if auto:
        source = torch.randint(3, 90, (1, SOURCE), generator=draw)
        inputs = {"input_ids": source, "decoder_input_ids": inputs[None]}
    return model if name == "gpt_oss" else model.double(), inputs, layer  # its experts need fp32


class Frozen:
    """Runs of a model in which modules write what they wrote in the first run, minus a part."""

    def __init__(self, model, inputs, layer):
        self.model, self.inputs, self.layer = model, inputs, layer
        self.seen = {}
        self.calls = self.recorded({}, outputs=True)
        self.q, self.k = self.calls[layer].query[0], self.calls[layer].key[0]

    def recorded(self, hooks, **more):
        handles = [self.model.get_submodule(n).register_forward_hook(h) for n, h in hooks.items()]
        if not hooks:
            handles = [m.register_forward_hook(self.note(n)) for n, m in self.model.named_modules()]
        inputs = self.inputs if isinstance(self.inputs, dict) else {"input_ids": self.inputs[None]}
        with torch.no_grad(), ch.watch(self.model, stats=["lse"], inputs=True, **more) as recording:
            self.model(**inputs)
        for handle in handles:
            handle.remove()
        return list(recording)

    def note(self, name):
        def hook(module, received, output):
            first = output[0] if isinstance(output, tuple) else output
            x = received[0] if received and isinstance(received[0], torch.Tensor) else None
            self.seen.setdefault(name, []).append((x, first))

        return hook

    def projection(self, component):
        heads, size = self.calls[component.layer].output.shape[1::2]
        return output_projection(self.model, component.module, heads, size)

    def without(self, components, component):
        """The queries and keys of the layer without what a component wrote."""
        removed = component.module
        if component.kind == "head":
            projection = self.projection(component)
            removed = projection.module
            z = self.calls[component.layer].output[0, component.head]
            part = z @ projection.weight[component.head].to(z)
        elif component.kind == "bias":
            part = self.model.get_submodule(removed).bias
        else:
            part = None
        writes = {x.module for x in components if x.kind in ("embedding", "mlp")}
        writes |= {self.projection(x).module for x in components if x.kind == "head"}
        norms = {n for n, m in self.model.named_modules() if "norm" in type(m).__name__.lower()}
        hooks = {n: self.frozen(n, part if n == removed else 0) for n in norms}
        for name in writes:
            x = self.seen[name][0][1]
            minus = 0 if name != removed else x if part is None else part.reshape(-1, x.shape[-1])
            hooks[name] = self.replaced(x, minus)
        if removed not in hooks:  # a bias of a projection to queries and keys
            hooks[removed] = lambda module, received, output: output - part
        call = self.recorded(hooks)[self.layer]
        return call.query[0], call.key[0]

    def replaced(self, x, minus):
        def hook(module, received, output):
            own_shape = isinstance(minus, torch.Tensor) and minus.numel() == x.numel()
            new = x - (minus.reshape(x.shape) if own_shape else minus)
            return (new, *output[1:]) if isinstance(output, tuple) else new

        return hook

    def frozen(self, name, minus):
        runs = iter(self.seen.get(name, []))

        def hook(module, received, output):
            x, y = next(runs)
            eps = next(
                getattr(module, n) for n in ("eps", "variance_epsilon") if hasattr(module, n)
            )
            centre = isinstance(module, torch.nn.LayerNorm)
            mean = x.mean(-1, keepdim=True) if centre else 0
            scale = ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
            gain = module.weight + ("Gemma" in type(module).__name__)
            change = received[0] - x
            change = change - (change.mean(-1, keepdim=True) if centre else 0)
            return y + change * scale * gain - minus

        return hook


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_are_those_that_runs_without_them_lack(name):
    model, inputs, layer = built(name)
    head, query, key = 3, 6, 3
    why = ch.why(model, inputs, layer=layer, head=head, query=query, key=key, against=2)
    largest = float(why.key_parts.abs().max().clamp(min=why.query_parts.abs().max()))
    for parts in (why.key_parts, why.query_parts):
        assert abs(float(parts.double().sum()) - why.contrast) < 1e-5 * largest
    if why.softcap is None:
        logs = why.weights.double().log()
        assert abs(float(logs[key] - logs[2]) - why.contrast) < 1e-4 * max(1, largest)
    if name == "albert":
        return  # one module writes in every layer, so a hook cannot take one part out
    runs = Frozen(model, inputs, layer)
    q, k = runs.q[head, query], runs.k[head * len(runs.k) // 4]
    scale = (float(why.by_key[:, key].double().sum()) - distance(why, key)) / float(q @ k[key])
    pairs = why.pairs()
    of_each_kind = {c.kind: i for i, c in enumerate(why.components) if c.kind != "distance"}
    strongest = [x.abs().topk(4).indices.tolist() for x in (why.key_parts, why.query_parts)]
    close = 2e-4 if name == "gpt_oss" else 1e-5
    for i in {*of_each_kind.values(), *strongest[0], *strongest[1]} - {last(why)}:
        other_q, other_k = runs.without(why.components, why.components[i])
        lacks_q = q - other_q[head, query]
        lacks_k = k - other_k[head * len(runs.k) // 4]
        expected = {
            "key": (q @ (lacks_k[key] - lacks_k[2]), why.key_parts[i]),
            "query": (lacks_q @ (k[key] - k[2]), why.query_parts[i]),
            "pair": (lacks_q @ (lacks_k[key] - lacks_k[2]), pairs[i, i]),
        }
        for side, (lacks, part) in expected.items():
            assert abs(scale * float(lacks) - float(part)) < close * largest, side
        lacks = scale * float(q @ lacks_k[key]) - float(why.by_key[i, key])
        assert abs(lacks) < close * float(why.by_key.abs().max())


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma2", "gemma3", "bert", "deepseek"])
def test_means_over_rows_are_those_of_all_pairs(name):
    """Grouped heads, rotations, norms of queries and keys, windows and a soft cap, S x S."""
    model, inputs, layer = built(name)
    head = 3
    why = ch.why(model, inputs, layer=layer, head=head, over="rows")
    runs = Frozen(model, inputs, layer)
    g = head * len(runs.k) // 4
    q, k = runs.q[head], runs.k[g]
    with torch.no_grad(), ch.watch(model, exact_rows=range(T)) as recording:
        model(input_ids=inputs[None])
    A = recording[layer].exact_rows[0, head].double()
    u = (A > 0).double()
    M = A - u / u.sum(-1, keepdim=True)
    one = ch.why(model, inputs, layer=layer, head=head, query=6, key=3)
    scale = float(one.by_key[:, 3].double().sum()) / float(q[6] @ k[3])
    largest = float(why.key_parts.abs().max().clamp(min=why.query_parts.abs().max()))
    assert abs(scale * float((M * (q @ k.T)).sum()) / T - why.contrast) < 1e-5 * largest
    for component, of_key, of_query in zip(
        why.components, why.key_parts, why.query_parts, strict=True
    ):
        other_q, other_k = runs.without(why.components, component)
        by_key = scale * M * (q @ (k - other_k[g]).T) / T
        by_query = scale * M * ((q - other_q[head]) @ k.T) / T
        assert abs(float(by_key.sum()) - float(of_key)) < 1e-5 * largest
        assert abs(float(by_query.sum()) - float(of_query)) < 1e-5 * largest
    rows = [ch.why(model, inputs, layer=layer, head=head, query=i) for i in range(T)]
    for mean, of_rows in (
        (why.terms, [row.terms for row in rows]),
        (why.frequencies, [row.frequencies for row in rows]),
    ):
        if mean is not None:
            expected = sum(torch.as_tensor(x).double() for x in of_rows) / T
            assert float((torch.as_tensor(mean) - expected).abs().max()) < 1e-5 * largest


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen3"])
def test_a_key_that_stands_further_back_has_the_score_of_a_run_at_that_position(name):
    """In layer 0 nothing but the rotation depends on positions."""
    model, inputs, _ = built(name)
    given = {"input_ids": inputs[None], "attention_mask": torch.ones(1, T, dtype=torch.long)}
    by = torch.tensor([0, 1, 4, 30])

    def run(moved):
        positions = torch.arange(T)
        positions[2] -= moved
        request = {**given, "position_ids": positions[None]}
        return ch.why(model, request, layer=0, head=1, query=5, key=2)

    why = run(0)
    for moved, change in zip(by.tolist(), why.further(by).tolist(), strict=True):
        other = run(moved)
        assert change == pytest.approx(other.score - why.score, abs=1e-5)
        assert change == pytest.approx(other.contrast - why.contrast, abs=1e-5)
        odds = (1 / why.weight - 1) * torch.tensor(-change).exp().item()  # as the page computes
        assert 1 / (1 + odds) == pytest.approx(other.weight, abs=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_without_a_rotation_it_is_unknown(name):
    model, inputs, layer = built(name)
    why = ch.why(model, inputs, layer=layer, head=1, query=5, key=2)
    assert why.further(torch.tensor([1])) is None


def test_of_a_row_it_is_unknown():
    model, inputs, layer = built("llama")
    why = ch.why(model, inputs, layer=layer, head=1, query=5)
    assert why.further(torch.tensor([1])) is None


def last(why):
    """The index of the position bias, or None."""
    return len(why.components) - 1 if why.components[-1].kind == "distance" else None


def distance(why, key):
    return float(why.by_key[-1, key]) if why.components[-1].kind == "distance" else 0.0


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_of_a_batch_is_split_without_its_padding(name, side):
    """A mean would count padding that looks at the text. So padding is refused, by its mask."""
    model, text, layer = built(name)
    padding, ones = torch.zeros(2, dtype=torch.long), torch.ones(T, dtype=torch.long)
    order = slice(None, None, -1 if side == "left" else 1)
    ids = torch.cat([text, padding][order])[None]
    mask = torch.cat([ones, padding][order])[None]
    for inputs in (
        {"input_ids": ids, "attention_mask": mask},
        {"input_ids": ids.expand(2, -1), "attention_mask": mask.expand(2, -1)},
    ):
        for asked in ({"over": "rows"}, {"query": 3, "key": 2}):
            with pytest.raises(ch.BadValue, match="text with padding"):
                ch.why(model, inputs, layer=layer, head=1, **asked)
    real = mask[0].bool()
    cut = {"input_ids": ids[:, real], "attention_mask": mask[:, real]}
    one = ch.why(model, cut, layer=layer, head=1, over="rows")
    assert torch.equal(
        one.key_parts, ch.why(model, text, layer=layer, head=1, over="rows").key_parts
    )
