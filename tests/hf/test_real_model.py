"""SmolLM2-135M-Instruct as a GGUF file, the real causal model: 270 heads on 90 key heads."""

import pytest
import torch

import clearhead as ch
from clearhead.models.report.opening import opening
from examples.smollm2 import cached

pytestmark = pytest.mark.slow
SENTENCE = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture(scope="module")
def smollm2():
    if not (file := cached()).is_file():
        pytest.skip(f"{file} is not there: `make real` fetches it")
    return ch.hf.Checkpoint(file)


def test_it_says_what_it_is(smollm2):
    assert smollm2.name == "SmolLM2-135M-Instruct (Q4_1, dequantised)"
    report = ch.report(smollm2, SENTENCE, progress=False)
    assert str(report).startswith("SmolLM2-135M-Instruct (Q4_1, dequantised): ")


# Published by people who read this model with llama.cpp or with its own tokenizer.json.
PUBLISHED = {
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "\n": [198],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
}


def test_its_token_ids_are_the_published_ones(smollm2):
    for text, ids in PUBLISHED.items():
        assert smollm2.tokenizer(text)["input_ids"] == ids


def test_its_weights_are_those_of_eager_attention(smollm2):
    import transformers

    eager = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.folder, attn_implementation="eager"
    ).eval()
    inputs = smollm2.tokenizer(SENTENCE, return_tensors="pt")
    with torch.no_grad():
        expected = eager(**inputs, output_attentions=True)
        logits = smollm2.predictor(**inputs).logits
    torch.testing.assert_close(logits, expected.logits, rtol=1e-3, atol=1e-3)
    for layer in (0, 13, 29):
        weights = smollm2.explain(SENTENCE, layer)["weights"]
        torch.testing.assert_close(weights, expected.attentions[layer], rtol=1e-3, atol=1e-4)
    assert smollm2.tokenizer.decode(int(logits[0, -1].argmax())) == " Mary"


@pytest.mark.parametrize(
    ("text", "token", "place", "source"),
    [(SENTENCE, "Mary", (23, 0), "Mary"), ("The capital of France is", "Paris", (23, 4), "France")],
)
def test_it_begins_at_the_head_that_continues_the_text(smollm2, text, token, place, source):
    report = ch.report(smollm2, text, next_token=True, progress=False)
    begin, predicted = opening(report), report.next_token
    assert predicted.token.strip() == token and (begin.head.layer, begin.head.head) == place
    assert report.tokens[begin.key].strip() == source and begin.weight > 0.5
    # Without the head, whose input of W_O is 0, the token is less probable by as much.
    import transformers

    eager = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.folder, attn_implementation="eager"
    ).eval()
    inputs = smollm2.tokenizer(text, return_tensors="pt")
    D, head = 64, begin.head.head

    def remove(_, args):
        z = args[0].clone()
        z[..., head * D : (head + 1) * D] = 0
        return (z,)

    with torch.no_grad():
        before = eager(**inputs).logits[0, -1].softmax(-1)
        projection = eager.model.layers[begin.head.layer].self_attn.o_proj
        with projection.register_forward_pre_hook(remove):
            after = eager(**inputs).logits[0, -1].softmax(-1)
    target = int(before.argmax())
    assert predicted.probability == pytest.approx(float(before[target]), abs=1e-4)
    assert begin.writer.without == pytest.approx(float(after[target]), abs=1e-4)
    assert after[target] < before[target] - 0.03


TEXTS = [
    SENTENCE,
    "The cat sat on the mat. The dog sat on the log.\ndef f(x):\n    return x",
    "One day, Lily saw a big red ball. Lily ran to the ball, and the ball ran from Lily.",
]


def test_roles_in_a_padded_batch_are_those_of_each_text_alone(smollm2):
    for text, batched in zip(TEXTS, ch.report_batch(smollm2, TEXTS, progress=False), strict=True):
        alone = ch.report(smollm2, text, progress=False)
        assert batched.tokens == alone.tokens and batched.text == text
        for ours, theirs in zip(batched.heads, alone.heads, strict=True):
            assert [role.name for role in ours.roles] == [role.name for role in theirs.roles]
            for role, other in zip(ours.roles, theirs.roles, strict=True):
                assert role.mass == pytest.approx(other.mass, abs=1e-3)
                assert (role.hits, role.words) == (other.hits, other.words)
        assert sum(bool(head.roles) for head in batched.heads) > 5


def test_its_later_sink_is_one_in_eager_hidden_states(smollm2):
    import transformers

    text = (
        "The museum opened at nine. By ten, the line of visitors reached the river, and the guards "
        "had begun to hand out numbers. Nobody minded; the autumn sun was warm, and a man with a "
        "violin played tunes that everyone knew but nobody could name."
    )
    report = ch.report(smollm2, text, progress=False)
    eager = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.folder, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        inputs = smollm2.tokenizer(text, return_tensors="pt")
        out = eager(**inputs, output_hidden_states=True, output_attentions=True)
    [sink] = report.registers_of(report.layers[0])
    assert (sink.token, str(sink.name)) == (14, " the")
    norms = out.hidden_states[sink.layer][0, 1:].double().norm(dim=-1)
    assert sink.norm == pytest.approx(float(norms[13] / norms.median()), rel=1e-3)
    even = (1 / torch.arange(1.0, 1 + norms.numel() + 1))[14:].sum()  # of the queries from it on
    received = out.attentions[sink.layer][0, :, :, 14].sum(-1).mean()
    assert sink.weight == pytest.approx(float(received / even), rel=1e-3)
    assert sum("later token (sink)" in {r.label for r in x.roles} for x in report.heads) > 30
