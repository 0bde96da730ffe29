"""The plan of a model is the sum over the calls that its configuration states."""

import pytest
import torch

import clearhead as ch
from clearhead.distributed import plan, plan_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.outside

T = 1 << 17


def gemma():
    """Return a model of five layers with a window and one without."""
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=6, sliding_window=512, hidden_size=32, intermediate_size=16,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=50,
    )  # fmt: skip
    return transformers.Gemma3TextModel._from_config(config, attn_implementation="clearhead").eval()


def of_call(mask, **options):
    q, k = (torch.empty(1, heads, T, 8, device="meta") for heads in (4, 2))
    return plan(q, k, k, world=8, mask=mask, **options)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("layout", ["contiguous", "head-tail"])
def test_the_plan_of_a_model_is_the_sum_of_its_layers(layout, heads):
    options = {"layout": layout, "heads": heads}
    local = of_call(ch.causal & ch.window(before=511), **options)
    whole = of_call(ch.causal, **options)
    ch.hf.register()
    of_model = plan_model(gemma(), torch.zeros(1, T, dtype=torch.long), world=8, **options)
    for name in ("pairs", "flops", "sent", "received", "exchanged", "sent_back"):
        both = zip(getattr(local, name), getattr(whole, name), strict=True)
        assert getattr(of_model, name) == [5 * x + y for x, y in both], name
    assert of_model.memory == whole.memory
    assert of_model.problem.startswith("Gemma3TextModel: 5 x B=1 H=4 G=2 Tq=131072")
    assert "; 1 x B=1" in of_model.problem and (of_model.heads, of_model.world) == (heads, 8)


def test_a_model_with_weights_is_planned_and_unchanged():
    block = ch.nn.TransformerBlock(24, 3)
    before = {name: x.clone() for name, x in block.state_dict().items()}
    of_model = plan_model(block, torch.randn(2, 40, 24), world=5)
    x = torch.empty(2, 3, 40, 8, device="meta")
    assert of_model.flops == plan(x, x, x, world=5, heads=1).flops
    assert all(torch.equal(x, before[name]) for name, x in block.state_dict().items())


def test_models_that_cannot_be_planned():
    with pytest.raises(ch.BadValue, match=r"Linear made no attention call"):
        plan_model(torch.nn.Linear(3, 3), torch.ones(2, 3), world=2)
    ch.hf.register()
    ids = torch.zeros(1, 40, dtype=torch.long)
    reads = {"input_ids": ids, "attention_mask": torch.ones(1, 40)}
    with pytest.raises(ch.BadValue, match=r"on the meta device: .*\n.*may not read any"):
        plan_model(gemma(), reads, world=2)
    with pytest.raises(ch.BadValue, match=r"heads"):
        plan_model(gemma(), ids, world=2, heads=3)
