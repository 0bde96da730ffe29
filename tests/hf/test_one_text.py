"""Functions that read the ids of one text take them as (T,) and as (1, T), with the same result."""

import pytest
import torch

import clearhead as ch

IDS = torch.tensor([3, 41, 5, 17, 29, 11, 2])
ABLATED = ch.edits.ablate(layers=[0], heads=[1])


def model():
    import transformers as t

    ch.hf.register()
    torch.manual_seed(0)
    config = t.GPT2Config(vocab_size=43, n_embd=12, n_layer=2, n_head=3, n_positions=31)
    return t.AutoModelForCausalLM.from_config(config, attn_implementation="clearhead").eval()


def patched(model, ids):
    patch = ch.edits.path(ABLATED, (1, 2), "key").as_patch(model, ids)
    with torch.no_grad(), ch.intervene(model, [patch]):
        return model(IDS[None]).logits


FUNCTIONS = {
    "effects": lambda model, ids: ch.effects(model, ids, estimate=False).grid(),
    "report": lambda model, ids: torch.tensor([h.entropy for h in ch.report(model, ids).heads]),
    "logit_attribution": lambda model, ids: ch.logit_attribution(model, ids).heads,
    "why": lambda model, ids: ch.why(model, ids, layer=1, head=2, query=-1).by_key,
    "as_patch": patched,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ids_of_one_text_are_a_batch_of_one(name):
    of_ids, gpt = FUNCTIONS[name], model()
    assert torch.equal(of_ids(gpt, IDS), of_ids(gpt, IDS[None]))
