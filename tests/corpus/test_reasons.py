"""The set `reasons` equals a dense pass in float64, and reads planted circuits back."""

import math

import pytest
import torch
import transformers

import clearhead as ch
from clearhead import demo
from tests.models.why.test_why import planted

from . import dense
from .models import MODELS, SIZES, WORDS, G, H, texts, tokenizer

CONTEXT, D, WIDTH = 19, 8, 48
TERMS = ("position", "query_by_position", "key_alone", "match")


class Dense:
    """A model with 2 layers in float64, whose stream and projections are read by hooks."""

    def __init__(self, name, model):
        self.name, self.model, self.llama = name, model, name == "llama"
        blocks = model.layers if self.llama else model.h
        self.blocks = list(blocks)

    def run(self, ids):
        """The parts of the stream of layer 1 and its divided norm, by name, and the weights."""
        seen = {}
        first = self.blocks[0]
        attention, mlp = (first.self_attn, first.mlp) if self.llama else (first.attn, first.mlp)
        projection = attention.o_proj if self.llama else attention.c_proj
        hooks = [
            projection.register_forward_pre_hook(lambda m, x: seen.update(z=x[0][0])),
            mlp.register_forward_hook(lambda m, x, y: seen.update(mlp=y[0])),
            self.blocks[0].register_forward_pre_hook(lambda m, x: seen.update(start=x[0][0])),
            self.blocks[1].register_forward_pre_hook(lambda m, x: seen.update(stream=x[0][0])),
        ]
        with torch.no_grad():
            out = self.model(input_ids=torch.tensor([ids]), output_attentions=True)
        for hook in hooks:
            hook.remove()
        W = projection.weight.T if self.llama else projection.weight
        z = seen["z"].unflatten(-1, (H, D))
        parts = {f"L0H{h}": z[:, h] @ W.view(H, D, -1)[h] for h in range(H)}
        parts["L0 MLP"], parts["start"] = seen["mlp"], seen["start"]
        if not self.llama:
            parts["bias h.0.attn.c_proj"] = projection.bias.expand_as(seen["start"])
        assert torch.allclose(sum(parts.values()), seen["stream"])
        return parts, seen["stream"], [x[0] for x in out.attentions]

    def heads(self, x, stream, T):
        """Queries and keys of layer 1, (H, T, D) each, from a part x of the stream."""
        block = self.blocks[1]
        norm = block.input_layernorm if self.llama else block.ln_1
        if not self.llama:
            x, stream = (y - y.mean(-1, keepdim=True) for y in (x, stream))
        eps = norm.variance_epsilon if self.llama else norm.eps
        x = x / (stream.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight
        if self.llama:
            a = block.self_attn
            q, k = (y(x).unflatten(-1, (-1, D)).transpose(0, 1) for y in (a.q_proj, a.k_proj))
            cos, sin = self.model.rotary_emb(x[None], torch.arange(T)[None])
            turn = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
            q, k = (y[0] for y in turn(q[None], k[None], cos, sin))
            return q.detach(), k.repeat_interleave(H // G, 0).detach()
        q, k = (x @ block.attn.c_attn.weight[:, : 2 * WIDTH]).split(WIDTH, -1)
        return tuple(y.unflatten(-1, (H, D)).transpose(0, 1).detach() for y in (q, k))

    def numbers(self, ids):
        """Of layer 1: contrast and terms, (H, T), and the parts of keys and queries, (H,)."""
        T = len(ids)
        parts, stream, weights = self.run(ids)
        visible = torch.ones(T, T).tril().double()
        M = weights[1] - visible / visible.sum(-1, keepdim=True)
        vectors = {name: self.heads(x, stream, T) for name, x in parts.items()}
        q, k = (sum(x) for x in zip(*vectors.values(), strict=True))
        if not self.llama:
            block = self.blocks[1]
            bias = block.attn.c_attn.bias + block.ln_1.bias @ block.attn.c_attn.weight
            of_biases = bias[: 2 * WIDTH].view(2, H, 1, D).detach().expand(2, H, T, D)
            q, k = q + of_biases[0], k + of_biases[1]
            vectors["biases"] = tuple(of_biases)
        scores = q @ k.mT / D**0.5
        assert torch.allclose(scores.masked_fill(visible == 0, -1e9).softmax(-1), weights[1])
        contrast = (M * scores).sum(-1)
        means = q.mean(1, keepdim=True).expand_as(q), k.mean(1, keepdim=True).expand_as(k)
        if self.llama:
            means = self.turned_means(q, k, T)
        terms = {
            name: (M * (a @ b.mT)).sum(-1) / D**0.5
            for name, a, b in zip(
                TERMS,
                (means[0], q - means[0], means[0], q - means[0]),
                (means[1], means[1], k - means[1], k - means[1]),
                strict=True,
            )
        }
        of = {
            ("key", name): (M * (q @ x[1].mT)).sum((1, 2)) / D**0.5 for name, x in vectors.items()
        }
        of |= {
            ("query", name): (M * (x[0] @ k.mT)).sum((1, 2)) / D**0.5 for name, x in vectors.items()
        }
        return {"contrast": contrast, **terms}, of

    def turned_means(self, q, k, T):
        """Means before rotation, rotated to each position, with complex numbers."""
        at = torch.outer(torch.arange(T).double(), self.model.rotary_emb.inv_freq.double())
        turn = torch.polar(torch.ones_like(at), at)

        def mean(x):
            flat = torch.complex(x[..., : D // 2].contiguous(), x[..., D // 2 :].contiguous())
            turned = (flat / turn).mean(1, keepdim=True) * turn
            return torch.cat([turned.real, turned.imag], -1)

        return mean(q), mean(k)


def built(name, **options):
    torch.manual_seed(3)
    model = MODELS[name](**options).eval()
    with torch.no_grad():
        for x in model.parameters():  # biases, and gains of norms
            x.add_(0.3 * torch.randn(x.shape) if x.dim() == 1 else 0)
    return model


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_reasons_equal_a_dense_pass(name, tmp_path):
    around = name == "llama"
    tok, contents = tokenizer(around), texts(12)
    oracle = Dense(name, built(name, attn_implementation="eager").double())
    expected, parts, queries = {}, {}, torch.zeros(len(contents), dtype=torch.long)
    for number, content in enumerate(contents):
        ids = tok(content, add_special_tokens=False)["input_ids"]
        for context in dense.contexts_of(ids, CONTEXT, ([0], [1]) if around else ([], [])):
            numbers, of = oracle.numbers(context)
            counts = torch.arange(len(context)) > 0
            queries[number] += len(context) - 1
            dense.add_numbers(
                expected, 1, number, {n: (x.detach(), counts) for n, x in numbers.items()}
            )
            for key, x in of.items():
                sums = parts.setdefault(key, torch.zeros(len(contents), H).double())
                sums[number] += x.detach()
    survey = ch.survey(
        built(name, attn_implementation="clearhead"), contents, out=tmp_path, tokenizer=tok,
        context=CONTEXT, metrics="reasons", shard_tokens=60,
    )  # fmt: skip
    assert len(survey.manifest.shards) > 2
    rows = {(r["layer"], r["head"], r["metric"]): r for r in survey.heads.to_pylist()}
    for key, (numbers, of_text) in expected.items():
        dense.assert_row(rows[key], dense.interval_of(torch.cat(numbers), of_text, len(contents)))
    largest = max(float(x.sum(0).abs().max()) for x in parts.values()) / int(queries.sum())
    table = {}
    for row in survey.query("select * from reasons where layer = 1").to_pylist():
        name_of = row["component"]
        if name_of.startswith("embedding"):
            name_of = "start"
        elif name_of.startswith("bias") and name_of != "bias h.0.attn.c_proj":
            name_of = "biases"
        table.setdefault((row["side"], name_of, row["head"]), []).append(row)
    assert {key[:2] for key in table} == {*parts}
    for (side, component, head), own in table.items():
        sums = parts[side, component][:, head]
        mean = sum(row["mean"] for row in own)
        assert mean == pytest.approx(float(sums.sum() / queries.sum()), abs=1e-5 * largest)
        if len(own) == 1:
            wanted = dense.interval(sums.tolist(), queries.tolist())
            ends = dense.ends_of(wanted, None, None)
            assert (own[0]["low"], own[0]["high"]) == pytest.approx(ends, rel=1e-3, abs=1e-5)
            assert own[0]["queries"] == int(queries.sum())
    sums = survey.query(
        "select r.layer, r.head, side, sum(r.mean) - any_value(h.mean) as off from reasons r "
        "join heads h on h.layer = r.layer and h.head = r.head and metric = 'contrast' group by all"
    )
    assert len(sums) == 2 * 2 * H and all(abs(row[3]) < 1e-5 * largest for row in sums.rows)


def test_shards_and_batches_have_no_influence(tmp_path):
    tables = []
    for number, options in enumerate(
        [{"shard_tokens": 40}, {"shard_tokens": 4096}, {"metrics": "basic,reasons"}]
    ):
        survey = ch.survey(
            built("llama", attn_implementation="clearhead"), texts(9), out=tmp_path / str(number),
            tokenizer=tokenizer(), context=CONTEXT, **({"metrics": "reasons"} | options),
        )  # fmt: skip
        rows = survey.query("select * exclude (low, high) from reasons order by all").rows
        tables.append({row[:4]: row[4:] for row in rows})
    first, *others = tables
    for other in others:
        assert other.keys() == first.keys()
        for key, row in first.items():
            assert other[key] == pytest.approx(row, rel=1e-5, abs=1e-6), key


def test_resumed_runs_have_the_same_rows(tmp_path):
    """Also if texts were added, and if the state of a shard was lost."""

    def survey(folder, contents):
        return ch.survey(
            built("llama", attn_implementation="clearhead"), contents, out=tmp_path / folder,
            tokenizer=tokenizer(), context=CONTEXT, metrics="reasons", shard_tokens=40,
        )  # fmt: skip

    one = survey("one", texts(9))
    survey("two", texts(9)[:4])
    for state in sorted((tmp_path / "two" / "states").iterdir())[1::2]:
        state.unlink()
    two = survey("two", texts(9))
    assert len(one.manifest.shards) > 2 and len(one.query("select * from reasons")) > 50
    assert one.digest() == two.digest()


class Planted(torch.nn.Module):
    """The planted circuit, for a survey: it has a configuration, and reads a dict."""

    def __init__(self):
        super().__init__()
        self.circuit = planted()

    def forward(self, input_ids):
        return self.circuit(input_ids)


def test_a_planted_circuit_is_read_back(tmp_path):
    """Head 1 of layer 0 copies the token before, where head 0 of layer 1 looks for the query's."""
    contents = ["owl saw fox owl saw", "fox ran it fox ran it", "owl hid then owl hid"]
    tok = tokenizer()
    assert max(tok(" ".join(contents))["input_ids"]) < planted().tokens.num_embeddings
    survey = ch.survey(
        Planted(), contents, out=tmp_path, tokenizer=tok, context=7, metrics="reasons"
    )
    best = "select component, mean from reasons where layer = 1 and head = 0 and side = ? "
    (contrast,) = survey.query(
        "select mean from heads where layer = 1 and head = 0 and metric = 'contrast'"
    ).rows[0]
    rows = survey.query(best + "order by mean desc", ["key"]).rows
    assert rows[0] == ("L0H1", pytest.approx(contrast, rel=1e-5)) and contrast > 5
    assert survey.query(best + "order by mean desc", ["query"]).rows[0][0].startswith("embedding c")
    first = "select component from reasons where layer = 0 and head = 1 and side = 'key' "
    assert survey.query(first + "order by mean desc").rows[0][0].endswith("positions")
    match = "select mean from heads where layer = 1 and head = 0 and metric = 'match'"
    assert survey.query(match).rows[0][0] > 0.75 * contrast


class Gated(Planted):
    def __init__(self):
        super().__init__()
        self.circuit.second.between = torch.nn.Tanh()


def test_a_model_that_why_refuses_is_refused_before_texts_are_read(tmp_path):
    def unread():
        raise AssertionError("a text was read")
        yield

    with pytest.raises(ch.BadValue) as alone:
        ch.why(Gated(), torch.arange(5), layer=1, head=0, over="rows")
    with pytest.raises(ch.BadValue, match="metrics has 'reasons'") as refused:
        ch.survey(
            Gated(), unread(), out=tmp_path / "out", tokenizer=tokenizer(), context=7,
            metrics="basic,reasons",
        )  # fmt: skip
    assert alone.value.gave in refused.value.gave and refused.value.rule == alone.value.rule
    assert not (tmp_path / "out").exists()
    config = transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        attn_implementation="clearhead",
    )  # fmt: skip
    with pytest.raises(ch.BadValue, match=r"'reasons'.*'dynamic', with other frequencies"):
        ch.survey(
            transformers.LlamaModel(config).eval(), ["owl"], out=tmp_path / "out",
            tokenizer=tokenizer(), metrics="reasons",
        )  # fmt: skip


def test_a_context_of_one_token_has_no_query(tmp_path):
    survey = ch.survey(demo.load(), ["Owl", "Fox"], out=tmp_path, metrics="reasons")
    assert not survey.heads and not survey.query("select * from reasons")


def test_the_contrast_is_a_divergence(tmp_path):
    """Without a sink and a cap it is that of the weights and uniform ones, both ways."""
    content = " ".join(WORDS)
    model, tok = built("t5", attn_implementation="clearhead"), tokenizer()
    with torch.no_grad():  # weights must not underflow to 0
        for name, x in model.named_parameters():
            x.mul_(0.3 if name.endswith(("q.weight", "k.weight")) else 1.0)
    survey = ch.survey(model, [content], out=tmp_path, tokenizer=tok, metrics="reasons,basic")
    (entropy,), (contrast,) = (
        survey.query(
            f"select mean from heads where layer = 1 and head = 2 and metric = '{m}'"
        ).rows[0]
        for m in ("entropy", "contrast")
    )
    n = len(tok(content)["input_ids"])
    with torch.no_grad(), ch.watch(model, exact_rows=list(range(n))) as recording:
        model(torch.tensor(tok(content)["input_ids"])[None])
    log = recording[1].exact_rows[0, 2].double().log()
    assert contrast == pytest.approx(float(-entropy - log.mean()), rel=1e-5)
    distance = (
        "select side, mean from reasons where layer = 1 and head = 2 and component = 'distance'"
    )
    sides = dict(survey.query(distance).rows)
    assert sides["key"] == sides["query"] and not math.isclose(sides["key"], 0)
