"""Decoding on a cache that is spread over ranks: the numbers of one machine, and the same bits on
all ranks."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist

import clearhead as ch
from clearhead.core.problem.check import Options
from clearhead.distributed import Layout, sharded
from clearhead.distributed.block import OpenBlock
from clearhead.distributed.decode import TURN, Decoding, decode_step
from clearhead.distributed.layouts import layout_of
from tests.distributed.processes import on_processes
from tests.distributed.threads import on_ranks
from tests.hf.test_models import build
from tests.problems import within_yardstick

PROBLEMS = {
    "everything": {},
    "causal": {"mask": ch.Causal(align="end")},
    "window": {"mask": ch.window(before=9, after=0, align="end")},
    "sink and window": {"mask": ch.window(before=9, after=0, align="end") | ch.prefix(2)},
    "blind": {"mask": ~ch.everything},
    "sinks": {"sinks": torch.tensor([0.1, -2.0, 3.0, 0.0, 1.0, 7.0])},
    "cap and scale": {"softcap": 3.0, "scale": 0.7},
    "alibi": {"mask": ch.Causal(align="end"), "bias": ch.alibi(align="end")},
}


@pytest.mark.parametrize("world", [1, 3, 8])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_step_is_as_exact_as_one_machine(name, dtype, world):
    draw = torch.Generator().manual_seed(7)
    problem = PROBLEMS[name]
    q, k, v = (
        torch.randn(2, h, n, d, generator=draw).to(dtype)
        for h, n, d in ((6, 3, 8), (2, 47, 8), (2, 47, 5))
    )
    if "sinks" in problem:
        problem = {"sinks": problem["sinks"].to(dtype)}
    layout = layout_of("head-tail", 47, world)

    def rank(transport):
        held = layout.positions[transport.rank]
        return decode_step(transport, Options(**problem), layout, q, held.cut(k, 2), held.cut(v, 2))

    first, *others = on_ranks(world, rank)
    assert all(torch.equal(first, other) for other in others)
    wide = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in problem.items()}
    true = ch.attention(q.double(), k.double(), v.double(), engine="steps", **wide)
    plain = ch.attention(q, k, v, engine="steps", **problem)
    fits, figures = within_yardstick(first, true, plain, float(v.abs().max()))
    assert fits, figures
    assert name == "blind" or bool(first.any())


def test_the_bytes_of_a_step_do_not_depend_on_the_cache():
    def sent(length: int) -> int:
        k, layout = torch.randn(1, 2, length, 8), layout_of("contiguous", length, 4)

        def rank(transport):
            posted = []
            start = transport.start
            transport.start = lambda out, into: posted.extend(out) or start(out, into)
            held = layout.positions[transport.rank].cut(k, 2)
            decode_step(
                transport, Options(), layout, torch.randn(1, 4, 1, 8), held, held, compare=False
            )
            return sum(x.nbytes for _, x in posted)

        (bytes_,) = set(on_ranks(4, rank))
        return bytes_

    assert sent(64) == sent(4096) == 3 * (4 * (8 + 2) * 4 + 8)  # with a digest of 8 bytes


def test_ranks_store_new_tokens_in_turns():
    layout = Layout([[range(5)], [range(5, 9)]])
    step = Decoding(layout, None, 1.0, 1, 9 + TURN - 1, OpenBlock())
    assert step.layout_after(2) == Layout(
        [[range(5), range(9, 9 + TURN)], [range(5, 9), range(9 + TURN, 10 + TURN)]]
    )
    assert step.cached_part(torch.arange(2.0)[:, None]).tolist() == [[1.0]]  # the second of the two


# --------------------------------------------------------------------------------- with models

T, NEW = 29, 6


def generated(rank: int) -> dict[str, tuple]:
    """Return the logits of new tokens, by one process and by all, and the number of cached keys."""
    from transformers import DynamicCache

    import clearhead.distributed.decode as decode_module

    decode_module.TURN = 2  # so that every rank gets new tokens
    found = {}
    text = torch.randint(1, 97, (2, T + NEW), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for kind in ("llama", "mistral", "gpt_oss"):
            model = build(kind, "AutoModelForCausalLM").eval()
            model.set_attn_implementation("clearhead")
            one, cache, steps = model(text).logits[:, T - 1 :], DynamicCache(), []
            with sharded(T, layout="head-tail") as here:
                mine = model(
                    here.shard(text[:, :T]),
                    position_ids=here.positions[None],
                    past_key_values=cache,
                )
                steps.append(here.last(mine.logits))
                for n in range(T, T + NEW):
                    with here.decoding(n):
                        token = text[:, n : n + 1]
                        at = torch.tensor([[n]])
                        step = model(token, position_ids=at, past_key_values=cache)
                        steps.append(step.logits)
            held = cache.layers[0].keys.shape[-2] - len(here.positions)
            found[kind] = one, torch.cat(steps, 1), held
        torch.manual_seed(0)
        layer = ch.nn.MultiHeadAttention(
            32, 4, kv_heads=2, causal=True, rotary=ch.nn.RotaryPositions(8)
        )
        x, cache = torch.randn(2, T + NEW, 32), ch.nn.KVCache()
        one = layer(x)[:, T - 1 :]
        with sharded(T, layout="head-tail") as here:
            steps = [here.last(layer(here.shard(x[:, :T], -2), cache=cache))]
            for n in range(T, T + NEW, 3):
                with here.decoding(n):
                    steps.append(layer(x[:, n : n + 3], cache=cache))
        found["nn"] = one, torch.cat(steps, 1), cache.length - len(here.positions)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_models_decode_on_a_cache_that_is_spread(world, tmp_path):
    ranks = on_processes(world, generated, tmp_path)
    for found in ranks:
        assert set(found) == {"llama", "mistral", "gpt_oss", "nn"}
        for one, steps, _ in found.values():
            torch.testing.assert_close(steps, one, rtol=2e-5, atol=2e-5)
    for kind in ranks[0]:
        for found in ranks:
            assert torch.equal(found[kind][1], ranks[0][kind][1])
    assert sum(found["nn"][2] for found in ranks) == NEW  # spread
    assert all(found["llama"][2] == NEW for found in ranks)  # a DynamicCache stores all of them


WAYS: dict[str, dict] = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2, "repetition_penalty": 1.2},
}
REFUSED: dict[str, dict] = {
    "computed again": {"use_cache": False},
    "looked up": {"prompt_lookup_num_tokens": 2},
    "padding": {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1]])},
}


def by_transformers(rank: int) -> tuple[dict, list[str]]:
    """Return the tokens that `generate` draws on one rank and on all, and errors."""
    found, errors, of_all = {}, [], ch.distributed.generate
    text = torch.randint(1, 97, (2, T), generator=torch.Generator().manual_seed(3))
    for kind in ("llama", "mistral", "gpt_oss", "gpt2"):
        model = build(kind, "AutoModelForCausalLM").eval()
        model.set_attn_implementation("clearhead")
        for (name, way), length in product(WAYS.items(), (T, dist.get_world_size() + 1)):
            drawn = []
            for run in (model.generate, partial(of_all, model)):
                torch.manual_seed(1)
                options = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None, **way}
                drawn.append(run(text[:, :length], **options))
            found[kind, name, length] = drawn
    calls = [(text[:1, :7], options) for options in REFUSED.values()]
    for ids, options in (*calls, (text, {"do_sample": True}), (text[:, :2], {})):
        torch.manual_seed(rank)
        with pytest.raises(ch.BadValue) as error:
            of_all(model, ids, timeout=20, max_new_tokens=4, pad_token_id=0, **options)
        errors.append(error.value.gave)
    return found, errors


def test_transformers_generates_after_a_text_that_is_cut(tmp_path):
    for found, errors in on_processes(2, by_transformers, tmp_path):
        assert len(found) == 32
        for which, (one, of_all) in found.items():
            assert torch.equal(one, of_all), which
        assert errors == [
            "generate() continued 7 tokens at position [0].",
            "generate() continued 6 tokens at position [0].",
            "generate() continued 6 tokens at position [5].",
            "The new queries of rank 1 differ from those of rank 0.",
            "The text has 2 tokens, for 2 ranks.",
        ]


def refusals(rank: int) -> list[str]:
    errors = []
    layer = ch.nn.MultiHeadAttention(8, 2, causal=True)
    x = torch.randn(1, T, 8)
    q = torch.randn(1, 2, 1, 4)
    with torch.no_grad(), sharded(T, timeout=20) as here:
        for do in (
            lambda cache: layer(x[:, :1], cache=cache),
            lambda cache: ch.attention(q, q, q, dropout=0.5, seed=1),
            lambda cache: ch.attention(q, q, q, engine="tiled"),
            lambda cache: ch.look(q, q, q),
        ):
            cache = ch.nn.KVCache()
            layer(here.shard(x, -2), cache=cache)
            with pytest.raises(ch.BadValue) as error, here.decoding(T + 5):
                do(cache)
            errors.append(error.value.gave)
    with pytest.raises(ch.BadValue) as error:
        k = torch.randn(1, 2, 3, 4)
        layout = Layout([[range(3)], [range(3, 6)]])
        softcap = [2.0, 3.0][rank]
        ch.distributed.decode(q, k, k, keys=layout, softcap=softcap, timeout=20)
    return [*errors, error.value.gave]


def test_what_cannot_be_decoded(tmp_path):
    for errors in on_processes(2, refusals, tmp_path):
        assert "Rank 0 of 2 has 16 keys, but 21 by Layout(0:15, 29:35; 15:29)." in errors[0]
        assert errors[1] == "decode got dropout."
        assert errors[2] == "engine='tiled' was passed inside distributed.sharded."
        assert errors[3] == "look was called inside distributed.sharded."
        assert errors[4].startswith("The ranks made different calls: softcap is 3.0 on")
