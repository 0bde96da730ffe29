"""`watch` and `report` of models with a text that is cut over processes: the numbers of one
machine."""

from contextlib import nullcontext

import pytest
import torch

import clearhead as ch
from clearhead.distributed import sharded
from clearhead.models.report import report
from tests.distributed.processes import on_processes
from tests.hf.test_models import build

T = 61
STATS = [
    "entropy",
    "max",
    "received",
    ch.topk(2),
    ch.mass({"first": ch.prefix(1)}),
    ch.pooled(4, 5),
    ch.value_weighted({"first": ch.prefix(1)}),
    ch.weighted("relative_value"),
    "varying",
]
MODELS = ["llama", "mistral", "gpt_oss", "nn"]
Numbers = dict[str, torch.Tensor]


def own_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return ch.nn.TransformerBlock(
        32, 4, kv_heads=2, causal=True, rotary=ch.nn.RotaryPositions(8)
    ).eval()


def model_and_input(kind: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    seed = torch.Generator().manual_seed(4)
    if kind == "nn":
        return own_model(), {"x": torch.randn(1, T, 32, generator=seed)}
    model = build(kind, "AutoModelForCausalLM").eval()
    model.set_attn_implementation("clearhead")
    return model, {"input_ids": torch.randint(1, 9, (1, T), generator=seed)}


def part_of(given: dict, here) -> dict:
    """Return this rank's part of the model's input."""
    if "x" in given:
        return {"x": here.shard(given["x"], -2)}
    return {
        "input_ids": here.shard(given["input_ids"]),
        "position_ids": here.positions[None],
        "use_cache": False,
    }


def run(model: torch.nn.Module, given: dict) -> object:
    return model(**given) if "input_ids" in given else model(given["x"])


def flat(call) -> Numbers:
    found = {"output": call.output, "blind": call.fully_masked}
    for name, x in call.statistics.items():
        if isinstance(x, dict):
            found |= {f"{name}.{group}": y for group, y in x.items()}
        elif isinstance(x, tuple):
            found |= {f"{name}.weights": x.weights, f"{name}.keys": x.keys}
        else:
            found[name] = x
    return {name: x for name, x in found.items() if x is not None}


def watched(rank: int, folder: str) -> dict[str, tuple]:
    found = {}
    for kind in MODELS:
        model, given = model_and_input(kind)
        with torch.no_grad():
            with ch.watch(model, stats=STATS, outputs=True, exact_rows=[-1]) as one:
                run(model, given)
            with sharded(T, layout="head-tail") as here:
                with ch.watch(model, stats=STATS, outputs=True, exact_rows=[-1]) as all_ranks:
                    run(model, part_of(given, here))
        assert repr(one) == repr(all_ranks)
        found[kind] = (
            [flat(call) for call in one],
            [flat(call) for call in all_ranks],
            one.scalars(),
            all_ranks.scalars(),
        )
    with torch.no_grad(), sharded(T) as here:
        to = f"{folder}/kept" if rank == 1 else None
        with ch.watch(model, to=to) as kept:
            run(model, part_of(given, here))
    assert bool(kept.written) == (rank == 1)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_watch_records_what_one_machine_does(world, tmp_path):
    for found in on_processes(world, watched, tmp_path, str(tmp_path)):
        assert set(found) == set(MODELS)
        for kind, (one, ranks, scalars, gauges_of_ranks) in found.items():
            assert len(one) == len(ranks) > 0
            for a, b in zip(one, ranks, strict=True):
                assert a.keys() == b.keys()
                for name in a:
                    torch.testing.assert_close(
                        b[name], a[name], rtol=2e-5, atol=2e-5, msg=f"{kind} {name}"
                    )
            assert gauges_of_ranks == pytest.approx(scalars, abs=2e-5)


def reported(rank: int) -> dict[str, tuple]:
    found = {}
    for kind in MODELS:
        model, given = model_and_input(kind)
        tokens = [f"t{i % 7}" for i in range(T)]
        single = given if "input_ids" in given else given["x"]
        one = report(model, single, tokens=tokens)
        with sharded(T, layout="head-tail") as here:
            part = part_of(given, here)
            ranks = report(model, part if "input_ids" in part else part["x"], tokens=tokens)
        pairs = [
            (getattr(a, name), getattr(b, name))
            for a, b in zip(one.layers, ranks.layers, strict=True)
            for name in ("pooled", "received", "allowed", "top_weights", "value_norms")
        ]
        found[kind] = one.to_json(), ranks.to_json(), pairs
    return found


def without_links(x: object, about: bool = False) -> object:
    """Return a report without its list of the strongest links, whose order rounding may change.
    With `about`, numbers are equal to numbers close to them."""
    if isinstance(x, dict):
        return {name: without_links(y, about) for name, y in x.items() if name != "links"}
    if isinstance(x, list):
        return [without_links(y, about) for y in x]
    return pytest.approx(x, abs=2e-5) if about and isinstance(x, float) else x


def test_a_report_of_shards_is_that_of_one_machine(tmp_path):
    for found in on_processes(2, reported, tmp_path):
        assert set(found) == set(MODELS)
        for one, ranks, pairs in found.values():
            assert without_links(ranks) == without_links(one, about=True)
            for a, b in pairs:
                torch.testing.assert_close(b, a, rtol=2e-5, atol=2e-5)
        assert all(head["norm_weighted"] for head in found["llama"][1]["layers"][0]["heads"])
        shares = [head["shares"] for head in found["llama"][1]["layers"][0]["heads"]]
        assert all(share["induction"] > 0 and share["duplicate"] > 0 for share in shares)


def watched_by_one(rank: int) -> str:
    model, given = model_and_input("nn")
    with torch.no_grad(), sharded(T, timeout=20) as here:
        with pytest.raises(ch.BadValue) as error:
            with ch.watch(model) if rank == 0 else nullcontext():
                run(model, part_of(given, here))
            run(model, part_of(given, here))
    return error.value.gave


def test_a_rank_that_watches_alone_is_named(tmp_path):
    for error in on_processes(2, watched_by_one, tmp_path):
        assert error.startswith("The ranks made different calls: ")
