"""What heads write toward the next token equals a dense pass in float64 with hooks."""

import pytest
import torch
import transformers
from tokenizers import processors

import clearhead as ch
from clearhead import demo

from . import dense
from .models import CONTEXT, SIZES, G, H, texts, tokenizer

MODELS = {
    "gpt2": lambda **k: transformers.GPT2LMHeadModel(transformers.GPT2Config(
        n_embd=48, n_layer=2, n_head=H, vocab_size=32, n_positions=64, initializer_range=0.4,
        bos_token_id=0, eos_token_id=1, **k)),
    "llama": lambda **k: transformers.LlamaForCausalLM(transformers.LlamaConfig(
        num_key_value_heads=G, initializer_range=0.3, **SIZES, **k)),
}  # fmt: skip
# The projections of heads with their matrices, (in, out), and the final norm.
PARTS = {
    "gpt2": lambda m: (
        [(x.attn.c_proj, x.attn.c_proj.weight) for x in m.transformer.h], m.transformer.ln_f
    ),
    "llama": lambda m: (
        [(x.self_attn.o_proj, x.self_attn.o_proj.weight.T) for x in m.model.layers], m.model.norm
    ),
}  # fmt: skip


def toward_next(model, name, ids):
    """What each head writes toward the next token, minus the mean of all tokens, (L, H, T - 1)."""
    projections, norm = PARTS[name](model)
    read = []
    handles = [
        m.register_forward_pre_hook(lambda _, args: read.append(args[0][0]))
        for m in [*(m for m, _ in projections), norm]
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    *heads, stream = read
    x = stream - stream.mean(-1, keepdim=True) if name == "gpt2" else stream
    epsilon = norm.eps if name == "gpt2" else norm.variance_epsilon
    scale = norm.weight / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()  # (T, d)
    unembedding = model.lm_head.weight
    u = unembedding[ids[1:]] - unembedding.mean(0)
    layers = []
    for z, (_, matrix) in zip(heads, projections, strict=True):
        written = torch.einsum("thv,hvd->htd", z.unflatten(-1, (H, -1)), matrix.view(H, -1, 48))
        if name == "gpt2":
            written = written - written.mean(-1, keepdim=True)
        layers.append((written[:, :-1] * scale[:-1] * u).sum(-1))
    return torch.stack(layers).detach()


@pytest.mark.parametrize("name", PARTS)
def test_what_heads_write_toward_the_next_token_equals_a_dense_pass(name, tmp_path):
    added = int(name == "llama")  # tokens before and after each context
    tok, contents = tokenizer(bool(added)), texts(12)
    torch.manual_seed(3)
    eager = MODELS[name](attn_implementation="eager").eval().double()
    sums, queries = {}, torch.zeros(len(contents), dtype=torch.long)
    for number, content in enumerate(contents):
        ids = tok(content, add_special_tokens=False)["input_ids"]
        for context in dense.contexts_of(ids, CONTEXT, ([0], [1]) if added else ([], [])):
            if (n := len(context) - 1 - added) < 1:
                continue
            parts = toward_next(eager, name, context)[..., :n]
            share = parts.abs() / parts.abs().sum((0, 1))
            queries[number] += n
            for metric, values in (("toward_next", parts), ("next_share", share)):
                of_texts = sums.setdefault(metric, torch.zeros(len(contents), 2, H).double())
                of_texts[number] += values.sum(-1)
    torch.manual_seed(3)
    model = MODELS[name](attn_implementation="clearhead").eval()
    survey = ch.survey(
        model, contents, out=tmp_path, tokenizer=tok, context=CONTEXT, metrics="attribution"
    )
    rows = survey.heads.to_pylist()
    assert len(rows) == 2 * 2 * H
    for row in rows:
        of_texts = sums[row["metric"]][:, row["layer"], row["head"]]
        limits = (0, 1) if row["metric"] == "next_share" else (None, None)
        dense.assert_row(row, dense.interval(of_texts.tolist(), queries.tolist()), *limits)
        assert row["uniform"] is None
    shares = survey.query("select sum(mean) from heads where metric = 'next_share'").rows
    assert shares[0][0] == pytest.approx(1, abs=1e-5)


def test_a_next_token_that_the_tokenizer_adds_does_not_count(tmp_path):
    """Two tokens before a text, one after: the query of the first does not count."""
    tok, content = tokenizer(True), "the owl saw a fox"
    tok.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> <unk> $A </s>", special_tokens=[("<s>", 0), ("<unk>", 2), ("</s>", 1)]
    )
    torch.manual_seed(3)
    model = MODELS["llama"](attn_implementation="clearhead").eval()
    survey = ch.survey(model, [content], out=tmp_path, tokenizer=tok, metrics="attribution")
    ids = torch.tensor(tok(content)["input_ids"])
    parts = ch.logit_attribution(model, ids, center=True).heads[..., 1:-1].mean(-1)
    means = "select mean from heads where metric = 'toward_next' order by layer, head"
    assert [x for (x,) in survey.query(means).rows] == pytest.approx(parts.flatten().tolist())


def test_another_unembedding_is_another_survey(tmp_path):
    options = {"out": tmp_path, "tokenizer": tokenizer(), "metrics": "attribution"}
    torch.manual_seed(3)
    model = MODELS["llama"](attn_implementation="clearhead").eval()
    ch.survey(model, ["the owl saw a fox"], **options)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(ch.BadValue, match="digest of the predictor"):
        ch.survey(model, ["the owl saw a fox"], **options)


def test_a_model_without_logits_is_refused(tmp_path):
    options = {"out": tmp_path / "out", "tokenizer": tokenizer(), "metrics": "basic,attribution"}
    model = MODELS["llama"](attn_implementation="clearhead").eval()
    with pytest.raises(ch.BadValue, match="'attribution', which needs logits"):
        ch.survey(model.model, ["the owl saw a fox"], **options)
    assert not (tmp_path / "out").exists()
    survey = ch.survey(
        demo.load(), ["The owl saw a fox.", "Owl"], out=tmp_path, metrics="attribution"
    )
    assert survey.heads
