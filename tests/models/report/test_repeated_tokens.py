"""Random tokens, repeated: the scores of heads, and models that cannot be tested."""

import pytest
import torch
from torch import nn

import clearhead as ch
from clearhead.core.errors import BadType, BadValue
from clearhead.models.report import report
from clearhead.models.report.repeated_tokens import TOKENS, repeated_token_scores


class Reader(nn.Module):
    """Four heads that look at what followed an earlier copy, at the copy, at the token before, and
    at all tokens alike. A token without an earlier copy looks at the first."""

    def __init__(self, words=300):
        super().__init__()
        self.embedding = nn.Embedding(words, 8)

    def forward(self, ids):
        B, T = ids.shape
        copy = (ids[:, :, None] == ids[:, None, :]).tril(-1)
        has = copy.any(-1)
        scores = torch.zeros(B, 4, T, T)
        after = copy.roll(1, -1)
        for head, cells in enumerate((after, copy)):
            scores[:, head] = 60.0 * cells
            scores[:, head, :, 0] = 60.0 * ~has
        scores[:, 2] = 60.0 * torch.eye(T).roll(-1, -1)
        self.weights = scores.masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf).softmax(-1)
        q = torch.zeros(B, 4, T, 8)
        return ch.attention(q, q, q, mask=ch.causal, bias=scores)


def test_scores_are_means_of_the_weights_on_random_repeated_tokens():
    model = Reader()
    ids = torch.tensor([[7, 8, 7, 9]])
    result = report(model, ids, repeated_tokens=True)
    w, n = model.weights.double(), TOKENS
    second = torch.arange(n + 1, 2 * n + 1)
    assert w.shape[-1] == 2 * n + 1
    for head in result.heads:
        own = w[:, head.head]
        right = {
            "induction": own[:, second, second - n + 1].mean(),
            "duplicate": own[:, second, second - n].mean(),
            "previous": own.diagonal(-1, 1, 2).mean(),
            "induction_all": own[:, second, second - n + 1].sum(1).mean() / (2 * n),
            "duplicate_all": own[:, second, second - n].sum(1).mean() / (2 * n),
        }
        assert head.repeated_tokens == pytest.approx(
            {k: float(x) for k, x in right.items()}, abs=1e-6
        )
    scores = [
        [x.repeated_tokens[k] for k in ("induction", "duplicate", "previous")] for x in result.heads
    ]
    assert [scores[h][h] > 0.98 for h in range(3)] == [True] * 3
    assert max(scores[3]) < 0.1 and max(scores[0][1:]) < 0.05
    assert report(model, ids).heads[0].repeated_tokens is None
    assert (
        result.to_json()["layers"][0]["heads"][0]["repeated_tokens"]
        == result.heads[0].repeated_tokens
    )
    assert result.as_rows()[0]["repeated_induction"] == result.heads[0].repeated_tokens["induction"]


def test_two_probes_have_the_same_tokens():
    model, ids = Reader(), torch.tensor([[7, 8]])
    assert repeated_token_scores(model, ids) == repeated_token_scores(model, ids)


def test_who_cannot_be_probed():
    layer = ch.nn.MultiHeadAttention(8, 2)
    with pytest.raises(BadType, match="does not read token ids"):
        report(layer, torch.zeros(1, 3, 8), repeated_tokens=True)
    with pytest.raises(BadValue, match="at least 4 tokens"):
        report(Reader(words=6), torch.tensor([[1, 2]]), repeated_tokens=True)


@pytest.mark.outside
def test_a_transformers_model_is_probed_whatever_its_inputs_are():
    transformers = pytest.importorskip("transformers")
    ch.hf.register()
    sizes = dict(
        vocab_size=90, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    config = transformers.BertConfig(**sizes)
    model = transformers.AutoModel.from_config(config, attn_implementation="clearhead").eval()
    ids = torch.tensor([[3, 4, 5]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    result = report(model, inputs, repeated_tokens=True)
    assert all(0 < x.repeated_tokens["previous"] < 1 for x in result.heads)
