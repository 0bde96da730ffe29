"""Models with a text that is cut over two processes: logits and gradients are those of one."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import clearhead as ch
from clearhead.distributed import sharded
from tests.distributed.processes import KINDS, on_processes
from tests.hf.test_models import build

LAYOUTS = ["contiguous", "head-tail"]
T = 23


def learned(model, loss) -> torch.Tensor:
    """Return the gradients of all weights, concatenated."""
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def transformers_models(rank: int) -> dict:
    found = {}
    text = torch.randint(1, 97, (2, T + 1), generator=torch.Generator().manual_seed(3))
    ids, labels = text[:, :-1], text[:, 1:]
    for kind in KINDS:
        model = build(kind, "AutoModelForCausalLM")
        model.set_attn_implementation("clearhead")
        one = model(ids).logits
        expected = learned(model, F.cross_entropy(one.flatten(0, 1), labels.flatten()))
        for layout in LAYOUTS:
            with sharded(T, layout=layout) as here:
                mine = model(
                    here.shard(ids), position_ids=here.positions[None], use_cache=False
                ).logits
                loss = F.cross_entropy(
                    mine.flatten(0, 1), here.shard(labels).flatten(), reduction="sum"
                )
                whole = here.unshard(mine.detach())
            got = learned(model, loss / labels.numel())
            dist.all_reduce(got)
            found[kind, layout] = (
                float((whole - one).abs().max() / one.abs().max()),
                float((got - expected).abs().max() / expected.abs().max()),
            )
    return found


def of_one_token(rank: int) -> dict[str, float]:
    """Return the errors of models of which each rank has one token."""
    text = torch.randint(1, 97, (2, 2), generator=torch.Generator().manual_seed(3))
    found = {}
    for kind in KINDS:
        model = build(kind, "AutoModelForCausalLM")
        model.set_attn_implementation("clearhead")
        with sharded(2) as here, torch.no_grad():
            logits = here.unshard(model(**here.inputs(text), use_cache=False).logits)
            attend = ALL_ATTENTION_FUNCTIONS["clearhead"]
            q = torch.randn(1, 2, 2, 8, generator=torch.Generator().manual_seed(3))
            mine = here.shard(q, -2)
            without_mask, _ = attend(model, mine, mine, mine, None, is_causal=True)
            without_mask = here.unshard(without_mask, 1).transpose(1, 2)
        off = (logits - model(text).logits, without_mask - ch.attention(q, q, q, mask=ch.causal))
        found[kind] = max(float(x.detach().abs().max()) for x in off)
    return found


def test_parts_of_one_token_are_causal(tmp_path):
    for found in on_processes(2, of_one_token, tmp_path):
        assert set(found) == set(KINDS) and max(found.values()) < 1e-5, found


def test_transformers_models_compute_what_one_process_computes(tmp_path):
    for found in on_processes(2, transformers_models, tmp_path):
        assert set(found) == {(kind, layout) for kind in KINDS for layout in LAYOUTS}
        for which, (logits, gradients) in found.items():
            assert logits < 1e-5 and gradients < 2e-5, f"{which}: {logits:.2g}, {gradients:.2g}"


def losses(rank: int) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the errors of the loss that a model computes itself, and of its gradients."""
    ids = torch.randint(1, 97, (2, T), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, 3:9] = labels[1, -2:] = -100  # another number of labels on each rank
    found = {}
    for kind in KINDS:
        model = build(kind, "AutoModelForCausalLM")
        model.set_attn_implementation("clearhead")
        one = model(ids, labels=labels, use_cache=False).loss
        expected = learned(model, one)
        for layout in LAYOUTS:
            with sharded(T, layout=layout) as here:
                loss = model(**here.inputs(ids, labels), use_cache=False).loss
                whole = here.total(loss.detach())
            got = learned(model, loss)
            dist.all_reduce(got)
            off = float((got - expected).abs().max() / expected.abs().max())
            found[kind, layout] = float(abs(whole - one) / one), off
    return found


def test_models_compute_their_loss_from_labels_of_the_whole_text(tmp_path):
    for found in on_processes(2, losses, tmp_path):
        assert set(found) == {(kind, layout) for kind in KINDS for layout in LAYOUTS}
        for which, (loss, gradients) in found.items():
            assert loss < 1e-5 and gradients < 2e-5, f"{which}: {loss:.2g}, {gradients:.2g}"


def refusals(rank: int) -> list[str]:
    model = build("llama", "AutoModelForCausalLM")
    model.set_attn_implementation("clearhead")
    ids = torch.randint(1, 97, (1, T), generator=torch.Generator().manual_seed(3))
    errors = []
    x = torch.randn(1, 2, 4, 8)
    with sharded(T) as here:
        mine, positions = here.shard(ids), here.positions[None]
        for do in (
            lambda: model(
                mine, position_ids=positions * 0 + torch.arange(mine.shape[1]) % 5, use_cache=False
            ),
            lambda: model(mine, attention_mask=torch.zeros_like(mine), position_ids=positions),
            lambda: ch.look(x, x, x),
            lambda: ch.matrix(x, x),
            lambda: ch.attention(x, x, x, engine="tiled"),
        ):
            with pytest.raises(ch.BadValue) as error:
                do()
            errors.append(error.value.gave)
    return errors


def test_what_a_shard_cannot_know_is_refused(tmp_path):
    for errors in on_processes(2, refusals, tmp_path):
        assert errors[0].startswith("The positions start again inside this rank's part")
        assert (
            errors[1] == "The model's attention_mask has zeros, and the text is sharded over ranks."
        )
        assert errors[2] == "look was called inside distributed.sharded."
        assert errors[3] == "matrix was called inside distributed.sharded."
        assert errors[4] == "engine='tiled' was passed inside distributed.sharded."


def own_layers(rank: int) -> list[float]:
    torch.manual_seed(0)
    block = ch.nn.TransformerBlock(32, 4, kv_heads=2, rotary=ch.nn.RotaryPositions(8))
    x = torch.randn(2, T, 32)
    ids = torch.arange(T) // 9
    found = []
    for mask in (None, ch.documents(ids)):
        one = block(x, mask=mask)
        expected = learned(block, one.square().sum())
        for layout in LAYOUTS:
            with sharded(T, layout=layout, mask=mask) as here:
                mine = block(here.shard(x, -2))
                whole = here.unshard(mine.detach())
            got = learned(block, mine.square().sum())
            dist.all_reduce(got)
            found += [float((whole - one).abs().max())]
            found += [float((got - expected).abs().max() / expected.abs().max())]
    return found


def test_own_layers_compute_what_one_process_computes(tmp_path):
    for found in on_processes(2, own_layers, tmp_path):
        assert len(found) == 8 and max(found) < 1e-5, found
