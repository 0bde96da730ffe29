"""The heads that write the predicted next token, against plain torch in float64, and where page and
terminal begin."""

import json
from dataclasses import replace

import pytest
import torch

from clearhead import demo
from clearhead.core.errors import BadType, BadValue
from clearhead.models.report import Report, report, summary
from clearhead.models.report.opening import opening
from clearhead.views.html.document import as_json
from clearhead.views.html.report import snapshot
from clearhead.views.serve.reader import Reader

WITCH = "Long ago there was a witch. She took her"


@pytest.fixture(scope="module")
def of_witch() -> Report:
    return report(demo.load(), WITCH, next_token=True, progress=False)


def parts_in_plain_torch(target):
    """What every head writes of a word's logit at the last word, by source word, (L, H, T)."""
    model = demo.load().model
    W_O, inputs, traces = [], [], [demo.load().explain(WITCH, layer) for layer in range(2)]
    for block in model.blocks:
        W_O.append(block.attention.out_proj.weight.double())
    hook = model.norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(torch.tensor(demo.load().encode(WITCH).ids))
    hook.remove()
    stream = inputs[0][..., -1, :].double().flatten()
    scale = (stream.var(correction=0) + model.norm.eps).rsqrt()
    words = model.head.weight.double()
    direction = (words[target] - words.mean(0)) * model.norm.weight.double() * scale
    parts = []
    for W, trace in zip(W_O, traces, strict=True):
        weights, v = trace["weights"][:, -1].double(), trace["value"].double()
        H, _, D = v.shape
        written = torch.einsum("htd,ehd->hte", v, W.unflatten(1, (H, D)))
        parts.append(weights * ((written - written.mean(-1, keepdim=True)) @ direction))
    return torch.stack(parts)


def probability_without(layer, head, target):
    """The probability of a word without a head, whose input of W_O is set to 0."""
    model = demo.load().model
    D = model.config.d // model.config.heads

    def remove(_, args):
        z = args[0].clone()
        z[..., head * D : (head + 1) * D] = 0
        return (z,)

    hook = model.blocks[layer].attention.out_proj.register_forward_pre_hook(remove)
    logits = model(torch.tensor(demo.load().encode(WITCH).ids))
    hook.remove()
    return float(logits[-1].softmax(-1)[target])


def test_the_writers_are_those_of_plain_torch(of_witch):
    found = of_witch.next_token
    assert found.token == "potions" == of_witch.guesses[-1][0][0]
    target = demo.load().words.index("potions")
    parts = parts_in_plain_torch(target)
    of_heads = parts.sum(-1).flatten()
    assert found.writers and [x.from_key for x in found.writers] == sorted(
        (x.from_key for x in found.writers), reverse=True
    )
    eighth = float(of_heads.sort(descending=True).values[7])
    for x in found.writers:
        row = parts[x.layer, x.head]
        assert x.part == pytest.approx(float(row.sum()), abs=1e-4) and x.part > eighth - 1e-4
        assert x.key == int(row.argmax())
        assert x.from_key == pytest.approx(float(row.max()), abs=1e-4)
        if x.without is not None:
            without = probability_without(x.layer, x.head, target)
            assert x.without == pytest.approx(without, abs=1e-5)


def test_the_clearest_writer_looks_at_an_earlier_word_and_counts(of_witch):
    found = of_witch.next_token
    clearest = found.clearest
    assert of_witch.tokens[clearest.key] == "witch"
    assert clearest.without < found.probability - 0.05
    # The model itself shows a pronoun first; without that, the page begins at this head.
    assert opening(of_witch).writer is None and of_witch.begin == (0, 7, 7)
    own = replace(of_witch, begin=None)
    begin = opening(own)
    assert (begin.head.layer, begin.head.head, begin.key) == (1, 7, clearest.key)
    assert begin.query == len(own.tokens) - 1
    assert snapshot(own)["begin"] == {"layer": 1, "head": 7, "query": begin.query}
    flat = " ".join(summary(own).split())
    assert f'the model predicts "potions", with {found.probability:.1%}. Begin with L1H' in flat
    assert f"Without this head the probability is {clearest.without:.1%}" in flat
    assert f'several): {len(found.writers)} write "potions", ' in flat
    assert all(f"{x.from_key:+.2f}" in flat for x in found.writers)
    assert 'At "her" (position 9, counted from 0) it looks at "witch" (position 5) with' in flat
    unclear = replace(found, clearest=None)  # the heads that write it are listed all the same
    other = " ".join(summary(replace(own, next_token=unclear)).split())
    written = f'the logit of "potions", the predicted next token ({found.probability:.1%})'
    assert "the model predicts" not in other and written in other
    assert all(f"{x.from_key:+.2f}" in other for x in found.writers)
    assert "the predicted next token" not in " ".join(
        summary(replace(own, next_token=None)).split()
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        # Without the heads that write most from an earlier word, it is as probable as before.
        ("Once upon a time there was a quiet queen. The queen", "measured"),
        ("The cat near that queen", "improbable"),
        # No head writes much: the MLPs do.
        (
            "Once upon a time there was a quiet queen and a young wizard. She danced in the castle "
            "because she was proud. He gave his books to her.",
            "small",
        ),
        ("Once", "one word"),
    ],
)
def test_no_head_is_called_clear_without_a_large_part_and_an_effect(text, why):
    found = report(demo.load(), text, next_token=True, progress=False).next_token
    assert found.clearest is None
    assert any(x.without is not None for x in found.writers) == (why == "measured")
    for x in found.writers:
        assert x.without is None or x.without > found.probability - 0.01


def test_a_model_that_predicts_no_token_says_so():
    from tests.models.report.models import AttentionCalls

    q = torch.zeros(1, 2, 3, 4)
    result = report(AttentionCalls((q, q, {})), torch.zeros(1), next_token=True)
    assert result.next_token is None and "predicts no next token" in result.next_token_withheld
    assert report(demo.load(), WITCH, progress=False).next_token_withheld == ""


def test_the_page_of_a_server_has_the_writers_of_an_unedited_model():
    reader, calls = Reader(), []
    report = reader.report(WITCH, None, lambda done, total: calls.append(done))
    assert report.next_token.clearest is not None
    assert calls == [0, 1, 2]  # further runs are not reported as progress
    digest = report.outputs
    data = json.loads(as_json(snapshot(reader.report(WITCH, {"off": []}))))
    assert data["outputs"] == digest and data["next_token"]["token"] == "potions"
    assert data["next_token"]["writers"][0] == {
        "layer": 1, "head": 7, "key": 5, "without": pytest.approx(0.2165, abs=1e-3),
        "part": pytest.approx(1.089, abs=1e-2), "from_key": pytest.approx(0.926, abs=1e-2),
    }  # fmt: skip
    assert "next_token" not in snapshot(reader.report(WITCH, {"off": [[1, 7]]}))


def test_a_report_with_its_writers_is_saved_and_loaded(of_witch, tmp_path):
    import clearhead as ch

    loaded = ch.load(replace(of_witch, model=None).save(tmp_path / "report"))
    assert loaded.next_token == of_witch.next_token and loaded.begin == of_witch.begin
    assert of_witch.to_json()["next_token"]["clearest"]["head"] == 7


def test_the_reason_of_a_model_whose_logits_cannot_be_split(monkeypatch):
    from clearhead.models.report import next_token

    def refuse(*_, **__):
        raise BadValue("The norm is not known.", "norms are known.", "none.")

    monkeypatch.setattr(next_token, "logit_attribution", refuse)
    result = report(demo.load(), WITCH, next_token=True, progress=False)
    assert result.next_token is None
    assert result.next_token_withheld == "The norm is not known: norms are known."


def test_a_token_is_not_a_switch():
    with pytest.raises(BadType, match="logit_attribution"):
        report(torch.nn.Linear(2, 2), torch.zeros(1, 2), next_token="sat")
