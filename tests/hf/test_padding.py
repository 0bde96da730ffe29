"""A padded batch gives each text what eager transformers gives it alone.

The reference is a plain eager model that reads one text; where attention is edited, a hook edits
the weights that `torch.nn.functional.softmax` gives, which eager attention calls once a layer.
"""

import pytest
import torch

import clearhead as ch
from clearhead.core.masks import duplicate_keys, induction_keys
from tests.hf.test_intervene import renormalised, weights_edited
from tests.hf.test_models import build

LENGTHS, T = (5, 8, 6), 9
AUTO = {
    "llama": "AutoModelForCausalLM",
    "gpt2": "AutoModelForCausalLM",
    "gemma3": "AutoModelForCausalLM",
    "bert": "AutoModelForMaskedLM",
    "t5": "AutoModelForSeq2SeqLM",
    "bart": "AutoModelForSeq2SeqLM",
}
DECODER_LENGTHS = (4, 3, 5)
SIDES = ("left", "right", "mixed")
# bart counts its positions from the first column, whatever its mask says.
CASES = [(kind, side) for kind in AUTO for side in SIDES if kind != "bart" or side == "right"]


def padded(lengths, T, side, seed):
    """Ids and mask of a batch, and the columns of each text."""
    made = torch.Generator().manual_seed(seed)
    ids, columns = torch.zeros(len(lengths), T, dtype=torch.long), []
    for b, n in enumerate(lengths):
        left = {"left": T - n, "right": 0, "mixed": (T - n) * (b % 2)}[side]
        ids[b, left : left + n] = torch.randint(3, 97, (n,), generator=made)
        columns.append(slice(left, left + n))
    return ids, (ids > 0).long(), columns


class Batch:
    """A model kind with a padded batch for it."""

    def __init__(self, kind, side):
        self.kind, self.model = kind, build(kind, AUTO[kind])
        if kind == "t5":  # which does not scale: keep weights from underflowing to 0
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    p.mul_(0.3 if name.endswith(("q.weight", "k.weight")) else 1.0)
        self.ids, self.mask, self.columns = padded(LENGTHS, T, side, 1)
        self.given = {"input_ids": self.ids, "attention_mask": self.mask}
        self.queries = self.columns
        if kind in ("t5", "bart"):
            side = "right" if kind == "bart" else side
            ids, mask, self.queries = padded(DECODER_LENGTHS, T, side, 2)
            self.given |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        else:
            self.given["position_ids"] = (self.mask.cumsum(-1) - 1).clamp(min=0)

    def alone(self, b, **more):
        """What eager gives text b."""
        self.model.set_attn_implementation("eager")
        given = {"input_ids": self.ids[b : b + 1, self.columns[b]], **more}
        if "decoder_input_ids" in self.given:
            given["decoder_input_ids"] = self.given["decoder_input_ids"][b, self.queries[b]][None]
        return self.model(**given)

    def weights(self, b):
        """The weights of each call on text b, with the columns of its queries and keys."""
        out = self.alone(b, output_attentions=True)
        q, k = self.queries[b], self.columns[b]
        if "decoder_input_ids" not in self.given:
            return [(w, k, k) for w in out.attentions]
        found = [(w, k, k) for w in out.encoder_attentions]
        for own, cross in zip(out.decoder_attentions, out.cross_attentions, strict=True):
            found += [(own, q, q), (cross, q, k)]
        return found

    def together(self):
        self.model.set_attn_implementation("clearhead")
        return self.model(**self.given)


@pytest.mark.parametrize(("kind", "side"), CASES)
@torch.no_grad()
def test_statistics_of_a_padded_batch_are_those_of_each_text_alone(kind, side):
    batch = Batch(kind, side)
    groups = {
        "first": ch.prefix(1),
        "span": (1, 3),
        "not": ~ch.prefix(2),
        "few": ch.lengths(keys=4),
    }
    stats = [ch.mass(groups), ch.topk(2), "entropy"]
    batch.model.set_attn_implementation("clearhead")
    with ch.watch(batch.model, stats=stats, exact_rows=[0, 2, -1]) as seen:
        batch.together()
    for b in range(len(LENGTHS)):
        for call, (w, q, k) in zip(seen, batch.weights(b), strict=True):
            w, key = w[0], torch.arange(w.shape[-1])
            right = {
                "first": key < 1, "span": (key >= 1) & (key < 3), "not": key >= 2, "few": key < 4
            }  # fmt: skip
            for name, cells in right.items():
                mass = (w * cells).sum(-1)
                torch.testing.assert_close(call.mass[name][b, :, q], mass, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(
                call.exact_rows[b, ..., k], w[:, [0, 2, -1]], rtol=1e-3, atol=1e-4
            )
            keys = call.topk.keys[b, :, q]  # -1 where a query sees one key alone
            found = w.gather(-1, keys.clamp(min=0)).masked_fill(keys < 0, 0.0)
            torch.testing.assert_close(call.topk.weights[b, :, q], found, rtol=1e-3, atol=1e-4)
            assert (call.topk.weights[b, :, q] >= w.topk(2, -1).values - 1e-4).all()


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("side", SIDES)
@torch.no_grad()
def test_masses_on_repeated_tokens_are_those_of_each_text_alone(kind, side):
    batch = Batch(kind, side)
    batch.ids.copy_(3 + batch.mask.cumsum(-1) % 2)  # two tokens in turn, also in the padding
    groups = {"same": ch.masks.duplicate_keys, "after": ch.masks.induction_keys}
    batch.model.set_attn_implementation("clearhead")
    with ch.watch(
        batch.model, stats=[ch.mass({name: keys(batch.ids) for name, keys in groups.items()})]
    ) as seen:
        batch.together()
    for b in range(len(LENGTHS)):
        ids = batch.ids[b, batch.columns[b]]
        for call, (w, q, _) in zip(seen, batch.weights(b), strict=True):
            for name, keys in groups.items():
                cells = keys(ids).to_bool(len(ids), len(ids))
                assert cells.any()
                mass = (w[0] * cells).sum(-1)
                torch.testing.assert_close(call.mass[name][b, :, q], mass, rtol=1e-3, atol=1e-4)


def first(w):
    return torch.arange(w.shape[-1]) < 1


def row(w, named):
    return torch.isin(torch.arange(w.shape[-2]), torch.tensor(named))[:, None]


def square(w):
    return ch.documents([0, 0, 1, 1, 1, 0, 2, 2]).to_bool()[: w.shape[-2], : w.shape[-1]]


# An edit, and what it does to the weights of a text alone.
EDITS = {
    "knock out": (ch.edits.knock_out(ch.prefix(1)), lambda w: renormalised(w * ~first(w))),
    "keep": (
        ch.edits.keep_only(ch.prefix(1) | ch.prefix(4) & ~ch.prefix(2), heads=[1]),
        lambda w: torch.where(
            torch.arange(4)[:, None, None] == 1,
            renormalised(w * torch.isin(torch.arange(w.shape[-1]), torch.tensor([0, 2, 3]))),
            w,
        ),
    ),
    "rows": (
        ch.edits.knock_out(ch.prefix(2), positions=[1, 2, 4], heads=[0, 3]),
        lambda w: torch.where(
            torch.isin(torch.arange(4), torch.tensor([0, 3]))[:, None, None] & row(w, [1, 2, 4]),
            renormalised(w * (torch.arange(w.shape[-1]) >= 2)),
            w,
        ),
    ),
    "last row": (
        ch.edits.scale(0.0, positions=[-1, 1]),
        lambda w: w * ~row(w, [w.shape[-2] - 1, 1]),
    ),
    "documents": (
        ch.edits.knock_out(ch.documents([0, 0, 1, 1, 1, 0, 2, 2]), heads=[2]),
        lambda w: torch.where(
            torch.arange(4)[:, None, None] == 2, renormalised(w * ~square(w)), w
        ),
    ),
    "near": (
        ch.edits.keep_only(ch.window(before=1, after=1)),
        lambda w: renormalised(
            w
            * (
                (torch.arange(w.shape[-2])[:, None] - torch.arange(w.shape[-1])).abs() <= 1
            )
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize(("kind", "side"), CASES)
@torch.no_grad()
def test_edits_of_a_padded_batch_are_those_of_each_text_alone(kind, side, name):
    batch, (edit, change) = Batch(kind, side), EDITS[name]
    batch.model.set_attn_implementation("clearhead")
    with ch.intervene(batch.model, [edit]):
        found = batch.together().logits
    for b in range(len(LENGTHS)):
        with weights_edited(1, lambda w, _: change(w)):
            right = batch.alone(b).logits[0]
        torch.testing.assert_close(found[b, batch.queries[b]], right, rtol=1e-3, atol=1e-3)
        assert (batch.alone(b).logits[0] - right).abs().max() > 1e-2  # it did something


@pytest.mark.parametrize("side", SIDES)
@torch.no_grad()
def test_rows_of_one_text_of_a_padded_batch(side):
    batch = Batch("llama", side)
    batch.model.set_attn_implementation("clearhead")
    plain = batch.together().logits
    with ch.intervene(batch.model, [ch.edits.scale(0.0, positions=[2], batch=range(1, 3))]):
        found = batch.together().logits
    with weights_edited(1, lambda w, _: w * ~row(w, [2])):
        for b in (1, 2):
            right = batch.alone(b).logits[0]
            torch.testing.assert_close(found[b, batch.columns[b]], right, rtol=1e-3, atol=1e-3)
    assert found[0].equal(plain[0])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@torch.no_grad()
def test_generating_from_padded_prompts(kind, cache):
    """Each step of a padded batch, beside the same step of each text alone."""
    model = build(kind, AUTO[kind])
    model.set_attn_implementation("clearhead")
    ids, mask, columns = padded(LENGTHS, T, "left", 1)
    stats = [ch.mass({"first": ch.prefix(1), "near": ch.window(before=1)}), ch.topk(1)]
    steps = dict(
        max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=2,
        cache_implementation=cache, disable_compile=True,
    )  # fmt: skip
    edits = [ch.edits.knock_out(ch.prefix(1), positions=[9], layers=[1])]

    def generate(ids, mask):
        with (
            ch.intervene(model, edits) as done,
            ch.watch(model, stats=stats, exact_rows=[-1]) as seen,
        ):
            made = model.generate(ids, attention_mask=mask, **steps)
        assert done.times(0) == 1 or len(ids) > 1
        return made[:, -6:], seen

    made, seen = generate(ids, mask)
    for b, n in enumerate(LENGTHS):
        alone, right = generate(ids[b : b + 1, columns[b]], mask[b : b + 1, columns[b]])
        assert made[b].equal(alone[0])
        for ours, theirs in zip(seen, right, strict=True):
            for name in ("first", "near"):
                mass = ours.mass[name][b, :, -1], theirs.mass[name][0, :, -1]
                torch.testing.assert_close(*mass, rtol=1e-3, atol=1e-4)
            assert ours.topk.keys[b, :, -1].equal(theirs.topk.keys[0, :, -1])
            sums = ours.exact_rows[b].sum((-1, -2))
            torch.testing.assert_close(
                sums, theirs.exact_rows[0].sum((-1, -2)), rtol=1e-3, atol=1e-4
            )
        assert n == LENGTHS[b]


@torch.no_grad()
def test_effects_on_a_padded_batch_are_those_on_each_text():
    batch = Batch("llama", "left")
    batch.model.set_attn_implementation("clearhead")
    edits = [ch.edits.knock_out(ch.prefix(1), layers=[n], heads=[1]) for n in (0, 1)]

    def last(output):
        return output.logits[:, -1].logsumexp(-1).mean()

    def measured(given):
        found = ch.effects(batch.model, given, last, edits, estimate=False, progress=False)
        return torch.tensor([effect.exact for effect in found])

    alone = [
        {"input_ids": batch.ids[b : b + 1, columns]} for b, columns in enumerate(batch.columns)
    ]
    right = torch.stack([measured(given) for given in alone]).mean(0)
    torch.testing.assert_close(measured(batch.given), right, rtol=1e-3, atol=1e-4)
    assert right.abs().max() > 1e-3


@torch.no_grad()
def test_a_report_of_a_padded_text_is_that_of_the_text():
    from clearhead.models.report import report

    model = build("llama", "AutoModelForCausalLM")
    model.set_attn_implementation("clearhead")
    ids, mask, (columns,) = padded([17], 23, "left", 4)
    for left in (columns.start, 0):
        ids, mask = ids.roll(left - columns.start, 1), mask.roll(left - columns.start, 1)
        given = {"input_ids": ids, "attention_mask": mask}
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        found = report(model, given, progress=False)
        alone = report(model, ids[:, left : left + 17], progress=False)
        for ours, theirs in zip(found.heads, alone.heads, strict=True):
            assert ours.shares == pytest.approx(theirs.shares, rel=1e-3, abs=1e-4)
            assert ours.entropy == pytest.approx(theirs.entropy, rel=1e-3)
            assert [(x.query - left, x.key - left) for x in ours.links] == [
                (x.query, x.key) for x in theirs.links
            ]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "bert", "t5"])
@torch.no_grad()
def test_the_reports_of_a_padded_batch_are_those_of_the_texts(kind):
    batch = Batch(kind, "mixed")
    batch.model.set_attn_implementation("clearhead")
    for b, ours in enumerate(ch.report_batch(batch.model, batch.given, progress=False)):
        alone = {"input_ids": batch.ids[b : b + 1, batch.columns[b]]}
        if kind == "t5":
            alone["decoder_input_ids"] = batch.given["decoder_input_ids"][b, batch.queries[b]][None]
        theirs = ch.report(batch.model, alone, progress=False)
        for layer, other in zip(ours.layers, theirs.layers, strict=True):
            torch.testing.assert_close(layer.received, other.received, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(layer.pooled, other.pooled, rtol=1e-3, atol=1e-4)
            assert layer.allowed.equal(other.allowed)
            assert layer.cross_attention == other.cross_attention


@torch.no_grad()
def test_rollout_of_a_padded_batch_is_that_of_each_text():
    batch = Batch("bert", "mixed")
    batch.model.set_attn_implementation("clearhead")
    with ch.watch(batch.model, exact_rows=range(max(LENGTHS))) as seen:
        batch.together()
    found = ch.rollout(seen, [0, -1])
    for b, columns in enumerate(batch.columns):
        with ch.watch(batch.model, exact_rows=range(LENGTHS[b])) as alone:
            batch.model(batch.ids[b : b + 1, columns])
        right = ch.rollout(alone, [0, -1])[0]
        torch.testing.assert_close(found[b][:, columns], right, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_a_model_with_torchs_attention_is_given_its_padding():
    """Under `patched`, a transformers model that calls torch's function hands on cells alone."""
    batch = Batch("bert", "left")
    batch.model.set_attn_implementation("sdpa")
    with ch.compat.patched(), ch.watch(batch.model, stats=[ch.mass({"1": ch.prefix(1)})]) as seen:
        batch.model(**batch.given)
    for b in range(len(LENGTHS)):
        for call, (w, q, _) in zip(seen, batch.weights(b), strict=True):
            mass = call.mass["1"][b, :, q]
            torch.testing.assert_close(mass, w[0, ..., 0], rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("error")
@torch.no_grad()
def test_a_text_that_is_padding_alone():
    batch = Batch("llama", "left")
    batch.model.set_attn_implementation("clearhead")
    mask = batch.mask.clone()
    mask[1] = 0
    given = {**batch.given, "attention_mask": mask}
    stats = [ch.mass({"first": ch.prefix(1)}), ch.topk(1)]
    edit = ch.edits.knock_out(ch.prefix(1), positions=[1])
    with (
        ch.intervene(batch.model, [edit]),
        ch.watch(batch.model, stats=stats, exact_rows=[0, -1]) as at,
    ):
        found = batch.model(**given).logits
    with ch.intervene(batch.model, [edit]):
        right = batch.together().logits
    assert not at[0].mass["first"][1].any() and not at[0].exact_rows[1].any()
    for b in (0, 2):
        torch.testing.assert_close(found[b, batch.columns[b]], right[b, batch.columns[b]])


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_checkpoint_edits_the_same_positions_again(kind):
    """In the backward pass it runs layers without the model around them, which has the mask."""
    batch = Batch(kind, "left")
    batch.model.set_attn_implementation("clearhead")
    batch.model.train()
    for module in batch.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    edits = [ch.edits.knock_out(ch.prefix(1), positions=[1, 2, -1])]
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            batch.model.activation_checkpointing_enable()
        batch.model.zero_grad()
        with ch.intervene(batch.model, edits):
            batch.model(**batch.given, use_cache=False).logits.square().mean().backward()
        gradients.append([p.grad.clone() for p in batch.model.parameters() if p.grad is not None])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain, rtol=1e-4, atol=1e-6)


def test_groups_by_id_take_the_ids_of_all_columns():
    """The ids of padding do not count, and the first token is that of the text."""
    model = build("llama", "AutoModelForCausalLM")
    model.set_attn_implementation("clearhead")
    pad, tokens = 6, torch.randint(3, 8, (2, 24), generator=torch.Generator().manual_seed(2))
    real = torch.ones_like(tokens)
    real[1, :pad] = 0
    positions = (real.cumsum(-1) - 1).clamp(min=0)

    def masses(tokens, **inputs):
        keys = {"induction": induction_keys(tokens), "duplicate": duplicate_keys(tokens)}
        with torch.no_grad(), ch.watch(model, stats=[ch.mass(keys)]) as seen:
            model(tokens, **inputs)
        return seen[0].mass

    padded = masses(tokens, attention_mask=real, position_ids=positions)
    for name, alone in masses(tokens[1:, pad:]).items():
        torch.testing.assert_close(padded[name][1, :, pad:], alone[0])
