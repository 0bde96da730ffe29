"""Compare the full text of errors: what the caller gave, the rule, the hint."""

# ruff: noqa: E501  (error texts are written as they are printed)

import copy
import pickle
import re
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.core.engines.choice import BY_NAME
from clearhead.core.errors import AttentionError, how_to_install

Q, K, V = torch.zeros(2, 6, 5, 4), torch.zeros(2, 3, 7, 4), torch.zeros(2, 3, 7, 8)


def call(q=Q, k=K, v=V, **keywords):
    return ch.attention(q, k, v, **keywords)


VALUES = {
    "different numbers of dimensions": (
        lambda: call(q=Q[0]),
        """The shapes are q (6, 5, 4), k (2, 3, 7, 4), v (2, 3, 7, 8).
  Rule: q is (B, H, Tq, D), k (B, G, Tk, D), v (B, G, Tk, Dv); all may omit B, or B and H.
  Hint: pass all three with the same number of dimensions, 2 to 4; unsqueeze(0) adds one.""",
    ),
    "one dimension": (
        lambda: call(*(torch.zeros(3),) * 3),
        """The shapes are q (3,), k (3,), v (3,).
  Rule: q is (B, H, Tq, D), k (B, G, Tk, D), v (B, G, Tk, Dv); all may omit B, or B and H.
  Hint: pass all three with the same number of dimensions, 2 to 4; unsqueeze(0) adds one.""",
    ),
    "different head sizes": (
        lambda: call(q=torch.zeros(2, 6, 5, 3)),
        """Queries have 3 features and keys 4 (q (2, 6, 5, 3), k (2, 3, 7, 4), v (2, 3, 7, 8)).
  Rule: a score is a dot product, so queries and keys have the same head size D.
  Hint: project both to the same size; check that k is not transposed.""",
    ),
    "more keys than values": (
        lambda: call(v=torch.zeros(2, 3, 6, 8)),
        """Keys have (G, Tk) = (3, 7) and values (3, 6) (q (2, 6, 5, 4), k (2, 3, 7, 4), v (2, 3, 6, 8)).
  Rule: every key has one value: k is (B, G, Tk, D) and v is (B, G, Tk, Dv).
  Hint: pass both with the same heads and the same length.""",
    ),
    "heads that do not divide": (
        lambda: call(q=torch.zeros(2, 5, 5, 4)),
        """There are H=5 query heads and G=3 key heads (q (2, 5, 5, 4), k (2, 3, 7, 4), v (2, 3, 7, 8)).
  Rule: H is a multiple of G, and query head i reads key head i // (H // G).
  Hint: change the number of heads, or repeat the key heads yourself.""",
    ),
    "different batches": (
        lambda: call(q=torch.zeros(3, 6, 5, 4)),
        """The batch sizes are 3, 2 and 2 (q (3, 6, 5, 4), k (2, 3, 7, 4), v (2, 3, 7, 8)).
  Rule: q, k and v have one batch size; a batch of 1 broadcasts.
  Hint: pass all three with the same batch size, or 1.""",
    ),
    "different devices": (
        lambda: call(k=K.to("meta")),
        """The devices are q cpu, k meta, v cpu.
  Rule: queries, keys and values are on one device.
  Hint: move them, for example with .to(q.device).""",
    ),
    "causal without a corner": (
        lambda: call(mask=ch.causal),
        """causal got Tq=5 queries and Tk=7 keys.
  Rule: if the numbers differ, align= must give the position of the queries.
  Hint: use Causal(align='end') if the last query is at the last key (a cache), or Causal(align='start') if query 0 is at key 0 (torch's is_causal).""",
    ),
    "alibi without a corner": (
        lambda: call(bias=ch.alibi()),
        """alibi() got Tq=5 queries and Tk=7 keys.
  Rule: if the numbers differ, align= must give the position of the queries.
  Hint: use alibi(align='end') if the last query is at the last key (a cache), or alibi(align='start') if query 0 is at key 0 (torch's is_causal).""",
    ),
    "alibi in two dimensions": (
        lambda: ch.alibi(torch.ones(1, 6)),
        """alibi got slopes of shape (1, 6).
  Rule: slopes are one per query head, (H,).
  Hint: flatten them to one dimension.""",
    ),
    "a mask without numbers": (
        lambda: call(mask=ch.dense(keep=torch.ones(5, 7, dtype=torch.bool, device="meta"))),
        """A mask holds a meta tensor of shape (5, 7).
  Rule: a meta tensor has a shape but no numbers.
  Hint: make the mask of tensors with numbers, or pass only meta tensors to attention(...).""",
    ),
    "alibi with other heads": (
        lambda: call(bias=ch.alibi([0.5, 0.25], align=0)),
        """alibi got 2 slopes for H=6 heads.
  Rule: every query head has one slope.
  Hint: pass 6 slopes, or none for those of the paper.""",
    ),
    "unknown engine": (
        lambda: call(engine="warp"),
        f"""engine='warp' is unknown.
  Rule: an engine is 'auto' or one of {", ".join(repr(e.name) for e in BY_NAME)}.
  Hint: omit engine= to let clearhead choose.""",
    ),
    "an engine that cannot": (
        lambda: call(engine="sdpa", softcap=2.0, sinks=torch.zeros(6)),
        """engine='sdpa' cannot compute this call: B=2 H=6 G=3 Tq=5 Tk=7 D=4 Dv=8, float32 on cpu, softcap 2, sinks.
  Rule: an engine that is named never falls back (sdpa: torch has no soft cap, torch has no sinks).
  Hint: omit engine= to use the fastest engine that can; plan(...) shows which one.""",
    ),
    "softcap of 0": (
        lambda: call(softcap=0),
        """softcap=0.
  Rule: softcap is a positive, finite number, or None for no cap.
  Hint: pass another softcap, or leave it out.""",
    ),
    "scale of NaN": (
        lambda: call(scale=float("nan")),
        """scale=nan.
  Rule: scale is a finite number, or None for 1/sqrt(D).
  Hint: pass another scale, or leave it out.""",
    ),
    "dropout in percent": (
        lambda: call(dropout=20),
        """dropout=20.
  Rule: dropout is the probability that a weight is dropped, from 0 to 1.
  Hint: pass a number such as 0.1; layers pass 0.0 outside training.""",
    ),
    "dropout of NaN": (
        lambda: call(dropout=float("nan")),
        """dropout=nan.
  Rule: dropout is the probability that a weight is dropped, from 0 to 1.
  Hint: pass a number such as 0.1; layers pass 0.0 outside training.""",
    ),
    "negative seed": (
        lambda: call(seed=-1),
        """seed=-1.
  Rule: a seed is a whole number from 0 to 2^63 - 1; None means torch's generator decides.
  Hint: pass a number such as 42.""",
    ),
    "seed without dropout": (
        lambda: call(seed=0),
        """seed=0 was passed without dropout=.
  Rule: a seed only decides which weights dropout drops.
  Hint: pass dropout=0.1 with it, dropout=0.0 outside training, or no seed.""",
    ),
    "bias of another shape": (
        lambda: call(bias=torch.zeros(7, 5)),
        """bias has shape (7, 5); the call has (B, H, Tq, Tk) = (2, 6, 5, 7).
  Rule: a bias broadcasts to (B, H, Tq, Tk).
  Hint: make each dimension that size or 1; a bias per head is (H, Tq, Tk), one per batch (B, 1, Tq, Tk).""",
    ),
    "bias of five dimensions": (
        lambda: call(bias=torch.zeros(1, 1, 1, 5, 7)),
        """bias got a tensor with 5 dimensions.
  Rule: a bias broadcasts to (B, H, Tq, Tk).
  Hint: pass at most 4 dimensions.""",
    ),
    "sinks for other heads": (
        lambda: call(sinks=torch.zeros(3)),
        """sinks has shape (3,) for H=6 query heads.
  Rule: sinks are extra logits, one per query head, (H,).
  Hint: pass a tensor of shape (6,).""",
    ),
    "tokens of another number": (
        lambda: ch.explain(Q, K, V, tokens=["the", "cat"]),
        """tokens has 2 entries for 5 positions.
  Rule: every position has one token as label.
  Hint: pass 5 tokens, or none.""",
    ),
    "an explanation too large": (
        lambda: ch.explain(*(torch.zeros(1, 1, 1, 1).expand(1, 9, 9000, 1),) * 3),
        """explain got B=1 H=9 Tq=9000 Tk=9000 D=1, float32 on cpu: it would hold about 6 matrices of 1x9x9000x9000 (17.5 GB, more than 4.3 GB).
  Rule: explain holds every matrix it shows.
  Hint: explain fewer tokens, heads or batches, or hold few rows: matrix(q, k).rows([...]).""",
    ),
    "explain by an unknown engine": (
        lambda: ch.explain(Q, K, V, engine="warp"),
        f"""engine='warp' is unknown.
  Rule: an engine is 'auto' or one of {", ".join(repr(e.name) for e in BY_NAME)}.
  Hint: omit engine= to let clearhead choose.""",
    ),
    "a statistic misspelt": (
        lambda: ch.look(Q, K, V, stats=["entorpy"]),
        """stats contains 'entorpy'.
  Rule: the statistics are "lse", "max", "entropy", "effective", topk(n), mass({name: mask}), weighted(n, {name: mask}), value_weighted({name: mask}), "received", "drop_error", pooled(rows, cols), exact_rows([queries]), "varying".
  Hint: did you mean 'entropy'?""",
    ),
    "a statistic of a look, misspelt": (
        lambda: ch.look(Q, K, V, stats=["entropy"]).entropi,
        """This look has no 'entropi'.
  Rule: a look holds what was requested: out, entropy.
  Hint: did you mean 'entropy'?""",
    ),
    "a statistic of a look that was not requested, although another has a similar name": (
        lambda: ch.look(Q, K, V, stats=[ch.pooled(2, 2)]).max,
        """This look has no 'max'.
  Rule: a look holds what was requested: out, pooled.
  Hint: request it in stats=; there are "lse", "max", "entropy", "effective", topk(n), mass({name: mask}), weighted(n, {name: mask}), value_weighted({name: mask}), "received", "drop_error", pooled(rows, cols), exact_rows([queries]), "varying".""",
    ),
    "a step that did not happen": (
        lambda: ch.explain(Q, K, V)["masked"],
        """There is no step 'masked' in this trace.
  Rule: a trace holds the steps that happened: query, key, value, scores, scaled, weights, output.
  Hint: name one of these; a step such as 'capped' needs its keyword in the call.""",
    ),
    "a step without its axes": (
        lambda: ch.Step("mine", "x", "Why.", "q k", torch.zeros(2, 3, 4)),
        """Step 'mine' has axes 'q k' and a tensor of shape (2, 3, 4).
  Rule: a step names every dimension of its tensor by one letter.
  Hint: name all dimensions, for example axes='b h q k'.""",
    ),
}

TYPES = {
    "a keyword of torch's function": (
        lambda: call(is_causal=True),
        """attention got is_causal=True.
  Rule: it is torch's; clearhead has mask=, bias=, dropout=, and groups heads by itself.
  Hint: pass mask=clearhead.causal or mask=clearhead.dense(keep=...), or call clearhead.compat.scaled_dot_product_attention, which takes torch's keywords.""",
    ),
    "an unknown keyword of a call that takes more": (
        lambda: ch.look(Q, K, V, stat=["lse"]),
        """look got stat=['lse'].
  Rule: look takes stats, mask, bias, scale, softcap, sinks, dropout, seed and engine.
  Hint: did you mean 'stats'?""",
    ),
    "an unknown keyword": (
        lambda: ch.plan(Q, K, V, causal=True),
        """plan got causal=True.
  Rule: plan takes mask, bias, scale, softcap, sinks, dropout, seed and engine.
  Hint: see help(clearhead.plan).""",
    ),
    "a list": (
        lambda: call(k=K.tolist()),
        """k is a list.
  Rule: queries, keys and values are torch tensors.
  Hint: pass torch.as_tensor(k).""",
    ),
    "whole numbers": (
        lambda: call(Q.long(), K.long(), V.long()),
        """The dtypes are q torch.int64, k torch.int64, v torch.int64.
  Rule: queries, keys and values are all float16, all bfloat16, all float32 or all float64.
  Hint: convert them, for example with .float() or .to(q.dtype).""",
    ),
    "mixed dtypes": (
        lambda: call(v=V.double()),
        """The dtypes are q torch.float32, k torch.float32, v torch.float64.
  Rule: queries, keys and values are all float16, all bfloat16, all float32 or all float64.
  Hint: convert them, for example with .float() or .to(q.dtype).""",
    ),
    "a bare boolean mask": (
        lambda: call(mask=torch.ones(5, 7).bool()),
        """mask is a boolean tensor of shape (5, 7).
  Rule: a boolean mask must state what True means, because libraries disagree.
  Hint: pass dense(keep=mask) if True means may look, and otherwise dense(drop=mask).""",
    ),
    "an additive mask": (
        lambda: call(mask=torch.zeros(5, 7)),
        """mask is a tensor of dtype torch.float32.
  Rule: a mask is a rule, and numbers that are added to scores are a bias.
  Hint: pass dense(keep=mask.bool()) if 1 means may look, or 0 and -inf as bias=.""",
    ),
    "a mask by its name": (
        lambda: call(mask="causal"),
        """mask is the string 'causal'.
  Rule: a mask is an object of clearhead, such as clearhead.causal.
  Hint: pass mask=clearhead.causal; clearhead.core.masks.parse(text) reads a notation.""",
    ),
    "an array of booleans": (
        lambda: call(mask=np.ones((5, 7), bool)),
        """mask is an array of booleans of shape (5, 7).
  Rule: a boolean mask must state what True means, because libraries disagree.
  Hint: pass dense(keep=mask) if True means may look, and otherwise dense(drop=mask).""",
    ),
    "dense without a word": (
        lambda: ch.dense(torch.ones(5, 7).bool()),
        """dense got a Tensor without a keyword.
  Rule: a boolean mask must state what True means, because libraries disagree.
  Hint: pass dense(keep=...) if True means may look, dense(drop=...) if it means must not.""",
    ),
    "an additive mask of booleans": (
        lambda: ch.causal.to_additive(3, dtype=torch.bool),
        """to_additive got dtype=torch.bool.
  Rule: an additive mask holds 0 and -inf, which are floating-point numbers.
  Hint: pass a floating dtype; to_bool() returns booleans.""",
    ),
    "a class of masks": (
        lambda: call(mask=ch.Causal),
        """mask is the class Causal.
  Rule: a mask is an instance of its class.
  Hint: call it: Causal(...); plain causal is `clearhead.causal`.""",
    ),
    "a boolean bias": (
        lambda: call(bias=torch.ones(5, 7).bool()),
        """bias got torch.bool.
  Rule: a bias is a tensor of fp16, bf16, fp32 or fp64 that is added to the scores.
  Hint: pass tensor.float(), or booleans as mask=dense(keep=...) or mask=dense(drop=...).""",
    ),
    "a bias of float8": (
        lambda: call(bias=torch.ones(5, 7).to(torch.float8_e4m3fn)),
        """bias got torch.float8_e4m3fn.
  Rule: a bias is a tensor of fp16, bf16, fp32 or fp64 that is added to the scores.
  Hint: pass tensor.float(), or booleans as mask=dense(keep=...) or mask=dense(drop=...).""",
    ),
    "a mask as bias": (
        lambda: call(bias=ch.causal),
        """bias got the mask causal.
  Rule: a bias is a tensor of fp16, bf16, fp32 or fp64 that is added to the scores.
  Hint: pass a mask as mask=.""",
    ),
    "a bias as mask": (
        lambda: call(mask=ch.alibi()),
        """mask is alibi().
  Rule: a mask selects keys, and a bias is added to the scores.
  Hint: pass it as bias=.""",
    ),
    "slopes of letters": (
        lambda: ch.alibi(["steep"]),
        """alibi got slopes=['steep'].
  Rule: slopes are numbers, one per query head.
  Hint: pass a tensor or list of floats; alibi() has the paper's, for any number of heads.""",
    ),
    "a mask_mod of FlexAttention": (
        lambda: call(mask=lambda b, h, q, k: q >= k),
        """mask is a function.
  Rule: a mask is an object of clearhead, not a function as in FlexAttention.
  Hint: pass clearhead.causal, window(before=...) or documents(...); for another mask_mod, dense(keep=torch.nn.attention.flex_attention.create_mask(mask_mod, B, H, Tq, Tk)).""",
    ),
    "a number of heads for slopes": (
        lambda: ch.alibi(8),
        """alibi got slopes=8.
  Rule: slopes are numbers, one per query head.
  Hint: pass a tensor or list of floats; alibi() has the paper's, for any number of heads.""",
    ),
    "nested queries": (
        lambda: call(*(torch.nested.nested_tensor([Q[0], Q[1]]) for _ in range(3))),
        """q is nested.
  Rule: queries, keys and values are dense tensors with strides.
  Hint: pass q.to_padded_tensor(0) and lengths(...), or join texts: documents(...).""",
    ),
    "nested keys beside dense queries": (
        lambda: call(k=torch.nested.nested_tensor([K[0], K[1]])),
        """k is nested.
  Rule: queries, keys and values are dense tensors with strides.
  Hint: pass k.to_padded_tensor(0) and lengths(...), or join texts: documents(...).""",
    ),
    "a nested bias": (
        lambda: call(bias=torch.nested.nested_tensor([Q[0], Q[1]])),
        """bias is nested.
  Rule: bias is a dense tensor with strides.
  Hint: pad it: bias.to_padded_tensor(0).""",
    ),
    "sparse sinks": (
        lambda: call(sinks=torch.ones(6).to_sparse()),
        """sinks is of layout torch.sparse_coo.
  Rule: sinks is a dense tensor with strides.
  Hint: pass sinks.to_dense().""",
    ),
    "sparse slopes": (
        lambda: ch.alibi(torch.ones(6).to_sparse()),
        """slopes is of layout torch.sparse_coo.
  Rule: slopes is a dense tensor with strides.
  Hint: pass slopes.to_dense().""",
    ),
    "a sparse mask": (
        lambda: ch.dense(keep=torch.ones(5, 7).bool().to_sparse()),
        """keep is of layout torch.sparse_coo.
  Rule: keep is a dense tensor with strides.
  Hint: pass keep.to_dense().""",
    ),
    "sparse ids": (
        lambda: ch.documents(torch.ones(5).long().to_sparse()),
        """ids is of layout torch.sparse_coo.
  Rule: ids is a dense tensor with strides.
  Hint: pass ids.to_dense().""",
    ),
    "complex counts": (
        lambda: ch.lengths(keys=torch.ones(2, dtype=torch.complex64)),
        """lengths got keys with dtype torch.complex64.
  Rule: keys holds counts of positions or ids of documents, which are whole numbers.
  Hint: pass integers.""",
    ),
    "booleans & a rule": (
        lambda: torch.ones(5, 5, dtype=torch.bool) & ch.causal,
        """A mask was composed by & with Tensor.
  Rule: masks compose only with masks.
  Hint: wrap booleans: dense(keep=tensor) if True means may look, else dense(drop=tensor).""",
    ),
    "a layer of another dtype": (
        lambda: ch.nn.SelfAttention(4, 4)(torch.ones(5, 4).half()),
        """SelfAttention got x of torch.float16, and its weights are torch.float32.
  Rule: a layer and its input have one dtype, unless autocast is on.
  Hint: pass x.to(torch.float32), or convert the layer with .to(torch.float16).""",
    ),
    "sinks in a list": (
        lambda: call(sinks=[0.0] * 6),
        """sinks is list.
  Rule: sinks are extra logits, one floating-point number per query head.
  Hint: pass a floating tensor of shape (6,).""",
    ),
    "scale as text": (
        lambda: call(scale="0.5"),
        """scale='0.5'.
  Rule: scale is a finite number, or None for 1/sqrt(D).
  Hint: pass another scale, or leave it out.""",
    ),
    "a scale that would learn": (
        lambda: call(scale=torch.tensor(0.5, requires_grad=True)),
        """scale requires a gradient.
  Rule: scale is a constant, and gets no gradient.
  Hint: pass scale=float(scale), or learn t in attention(t * q, k, v, scale=1).""",
    ),
    "tokens in one string": (
        lambda: ch.explain(Q, K, V, tokens="the cat sat on it"),
        """tokens is one string, 'the cat sat on it'.
  Rule: tokens are a list of strings, one for each position.
  Hint: split it first, for example tokens=text.split().""",
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_and_shapes_that_do_not_fit(name):
    call, text = VALUES[name]
    with pytest.raises(ch.BadValue, match=f"^{re.escape(text)}$") as caught:
        call()
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, ch.AttentionError)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", TYPES)
def test_kinds_that_do_not_fit(name):
    call, text = TYPES[name]
    with pytest.raises(ch.BadType, match=f"^{re.escape(text)}$") as caught:
        call()
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, ch.AttentionError)


@pytest.mark.parametrize("verb", [ch.explain, ch.plan, lambda q, k, v, **kw: ch.matrix(q, k, **kw)])
def test_every_verb_checks_the_problem(verb):
    with pytest.raises(ch.BadValue, match="There are H=5 query heads and G=3 key heads"):
        verb(torch.zeros(2, 5, 5, 4), K, V)
    with pytest.raises(ch.BadType, match="mask is a boolean tensor"):
        verb(Q, K, V, mask=torch.ones(5, 7).bool())


@pytest.mark.parametrize("kind", [ch.BadValue, ch.BadType])
def test_errors_travel(kind):
    """Between processes, as data loaders and test runners send them."""
    error = kind("You gave 3.", "It is 2.", "Give 2.")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error)
    assert (again.gave, again.rule, again.hint) == ("You gave 3.", "It is 2.", "Give 2.")
    assert issubclass(kind, AttentionError)


def wrong_kinds():
    x = torch.randn(2, 3)
    trace = ch.explain(x, x, x)
    return {
        "a text of numbers": (lambda: ch.explain_text(3), "explain_text got an int"),
        "a size in letters": (lambda: ch.explain_text("a b", size="8"), "size='8'"),
        "half a seed": (lambda: ch.explain_text("a b", seed=1.5), "seed=1.5"),
        "heads that do not divide": (lambda: ch.explain_text("a b", heads=3), "size=8 and heads=3"),
        "tokens that are a number": (lambda: ch.explain(x, x, x, tokens=5), "tokens is 5"),
        "why of a letter": (lambda: ch.causal.why("a", 1), "q='a'"),
        "why of half a place": (lambda: ch.causal.why(1.5, 1), "q=1.5"),
        "half a size": (lambda: ch.causal.to_bool(5.7), "Tq=5.7"),
        "a tile with a step": (lambda: ch.causal.tile(range(0, 4, 2), range(4)), "tile got q="),
        "no digits": (lambda: ch.views.text.show(trace, decimals=-1), "decimals=-1"),
        "no digits to follow": (lambda: ch.views.text.follow(trace, 0, decimals=99), "decimals=99"),
        "a tensor to show": (lambda: ch.views.text.show(x), "A view got a Tensor"),
        "nothing to attend to": (lambda: ch.attention(None, x, x), "q is None"),
        "slopes of yes and no": (lambda: ch.alibi(x > 0), "slopes of torch.bool"),
    }


@pytest.mark.parametrize("name", wrong_kinds())
def test_every_error_names_the_argument(name):
    call, text = wrong_kinds()[name]
    with pytest.raises(ch.AttentionError) as error:
        call()
    assert text in error.value.gave and error.value.rule and error.value.hint


def test_an_error_travels_whole():
    """Copied, or sent from another process."""
    error = ch.BadValue("this", rule="that", hint="so")
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert str(again) == str(error) == "this\n  Rule: that\n  Hint: so"


def test_a_hint_to_install_names_the_checkout_of_an_uninstalled_clearhead(monkeypatch):
    """The name on PyPI is not ours."""

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    how = how_to_install.__wrapped__("plot")
    assert how.endswith(f" -m pip install '{Path(__file__).parents[1]}[plot]'")
