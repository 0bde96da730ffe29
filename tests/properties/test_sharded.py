"""`distributed.sharded` in random training steps on 2 and 3 processes: the numbers of one process,
or an error on every rank that names the cause.

After each step the same ranks run a plain step, which must be right, because an error must not
break the group. Rerun a step:

    python -m tests.properties.test_sharded 3 17
"""

import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

import clearhead as ch
from clearhead.distributed import Layout, sharded
from tests.distributed.processes import on_processes

from .by_hand import short_repr
from .models import WORDS, build

T, WIDTH, HEADS = 23, 16, 4
TOKEN = torch.tensor([[7]])  # after the text
OWN = "block", "attention"  # models of this file
SCATTERED = {
    2: Layout([[range(0, 5), range(12, T)], [range(5, 12)]]),
    3: Layout([[range(0, 5)], [range(5, 12), range(15, T)], [range(12, 15)]]),
}

# How all ranks run the model, or what only the last rank does, and a part of its error.
CAUSES = {
    "checkpointed": "activation checkpoint",
    "checkpointed, reentrant": "activation checkpoint",
    "in a thread": "thread",
    "backward in a thread": "thread",
    "never calls clearhead": "no attention call",
    "without position_ids": "no position_ids",
    "with labels": "labels=",
    "skips the step": "left its block",
    "fails half way": "left its block",
    "other mask": "mask is",
    "other slopes": "bias is",
    "bias of all queries": "rows of queries",
    "other statistics": "stats is",
    "no statistics": "call is",
    "other token": "new queries",
}


@dataclass(frozen=True)
class Case:
    """A training step on several ranks, drawn from a seed."""

    seed: int
    world: int
    model: str  # of transformers, or one of OWN
    layout: str = "contiguous"  # "head-tail" or "scattered"
    documents: bool = False  # several texts, by sharded(mask=)
    bias: str = "none"  # "alibi", or "pairs" of tokens
    statistics: bool = False
    backward: str = "none"  # "inside" or "outside" of the block
    decodes: bool = False  # a token after the text, with a cache
    how: str = "called"
    odd: str = "nothing"

    __repr__ = short_repr


def draw(seed: int, world: int, compiled: bool = False) -> Case:
    """Draw the step of a seed, for a number of ranks."""
    random = Random(f"{world} {seed}")
    model = random.choice(["llama", "mistral", "gpt2", "gemma2", "block", "attention", "attention"])
    bias = random.choice(["none", "alibi", "pairs"]) if model == "attention" else "none"
    statistics = random.random() < 0.3
    how = ["checkpointed", "checkpointed, reentrant", "in a thread", "backward in a thread"]
    if model not in OWN:
        how += ["never calls clearhead", "without position_ids", "with labels"]
    if compiled:
        how = ["compiled by eager", "compiled by aot_eager"]
    odd = ["skips the step", "fails half way", "other mask"]
    odd += {"none": [], "alibi": ["other slopes"], "pairs": ["bias of all queries"]}[bias]
    odd += ["other statistics", "no statistics"] * statistics
    backward = "none" if statistics else random.choice(["none", "inside", "outside"])
    decodes = backward == "none" and model not in OWN and random.random() < 0.5
    odd += ["other token"] * decodes
    unusual = "how" if compiled else random.choice(["nothing", "how", "odd"])
    return Case(
        seed=seed,
        world=world,
        model=model,
        layout=random.choice(["contiguous", "head-tail", "scattered"]),
        documents=model in OWN and random.random() < 0.3,
        bias=bias,
        statistics=statistics,
        backward=backward,
        decodes=decodes and unusual != "how",
        how=random.choice(how) if unusual == "how" else "called",
        odd=random.choice(odd) if unusual == "odd" else "nothing",
    )


# ------------------------------------------------------------------------------------ the step


class Attention(nn.Module):
    """A layer that calls attention; for "pairs" its bias has the rows of the named queries."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.pairs = nn.Parameter(torch.randn(T, T))

    def forward(
        self, x: Tensor, mask: ch.masks.Mask, bias: Any = None, queries: Tensor | None = None
    ) -> Tensor:
        bias = bias if queries is None else self.pairs[queries]
        q, k, v = self.project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + ch.attention(q, k, v, mask=mask, bias=bias).transpose(1, 2).flatten(2)


class TwoLayers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        rotary = ch.nn.RotaryPositions(WIDTH // HEADS)
        block = partial(ch.nn.TransformerBlock, WIDTH, HEADS, kv_heads=2, rotary=rotary)
        make = Attention if kind == "attention" else block
        self.layers = nn.ModuleList([make(), make()])

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, **given)
        return x


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(case.seed)
    return TwoLayers(case.model) if case.model in OWN else deepcopy(build(case.model))


def text_of(case: Case) -> tuple[Tensor, Tensor]:
    """Return the whole text, and the factors of its output in the loss."""
    random = torch.Generator().manual_seed(case.seed)
    slopes = torch.randn(1, T, WORDS, generator=random)
    if case.model in OWN:
        return torch.randn(1, T, WIDTH, generator=random).requires_grad_(), slopes[..., :WIDTH]
    return torch.randint(3, WORDS, (1, T), generator=random), slopes


def keywords(case: Case, positions: Tensor, odd: str = "nothing") -> dict[str, Any]:
    """Return the model's other arguments, at these positions."""
    if case.model not in OWN:
        return {"use_cache": False, "position_ids": positions[None]}
    given: dict[str, Any] = {"mask": ch.causal}
    if case.bias == "alibi":
        given["bias"] = ch.alibi([0.5, 0.25, 0.125, 0.06 + 1e-6 * (odd == "other slopes")])
    if case.bias == "pairs":
        given["queries"] = torch.arange(T) if odd == "bias of all queries" else positions
    return given


def documents(odd: str = "nothing") -> ch.masks.Mask:
    return ch.documents(torch.arange(T) // (9 if odd == "other mask" else 10))


def watching(model: nn.Module, odd: str = "nothing") -> Any:
    first = ch.prefix(3 if odd == "other statistics" else 2)
    return ch.watch(model, stats=["entropy", "received", ch.mass({"first": first})])


class Numbers(NamedTuple):
    """Results of a step: its output, that of a token after the text, gradients of the weights, and
    statistics of both layers."""

    output: Tensor
    decoded: Tensor
    gradients: Tensor
    statistics: list[Tensor]


def numbers(
    model: nn.Module, output: Tensor, decoded: Tensor, recording: ch.Recording | None
) -> Numbers:
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    statistics = [(c.entropy, c.received, c.mass["first"]) for c in recording or ()]
    return Numbers(
        output.detach(),
        decoded.detach(),
        torch.cat([x.detach().flatten() for x in gradients]),
        [x.detach() for x in chain(*statistics)],
    )


def in_one_process(case: Case) -> Numbers:
    model, (text, slopes), recording = model_of(case), text_of(case), None
    given = keywords(case, torch.arange(T))
    if case.documents:
        given["mask"] = ch.causal & documents()
    with ExitStack() as block:
        if case.statistics:
            recording = block.enter_context(watching(model))
        output = output_of(model(text, **given))
    decoded = output
    if case.decodes:
        decoded = model(torch.cat([text, TOKEN], 1), use_cache=False).logits[:, T:]
    if case.backward != "none":
        (output * slopes).sum().backward()
    return numbers(model, output, decoded, recording)


def on_this_rank(case: Case, odd: str) -> Numbers:
    """Run the step in a block of `sharded`, in which the rank may do something odd."""
    model, (text, slopes), recording = model_of(case), text_of(case), None
    run = as_drawn(case, model)
    if odd == "fails half way":
        layers_of(model)[1].register_forward_pre_hook(fail)
    layout = SCATTERED[case.world] if case.layout == "scattered" else case.layout
    mask = documents(odd) if case.documents or odd == "other mask" else None
    with ExitStack() as block:
        block.enter_context(torch.set_grad_enabled(case.backward != "none"))
        here = block.enter_context(sharded(T, layout=layout, mask=mask, timeout=10))
        if odd == "skips the step":
            fail()
        given = keywords(case, here.positions, odd)
        if case.how == "with labels":
            given["labels"] = here.shard(text)
        if case.how == "without position_ids":
            del given["position_ids"]
        if case.decodes:
            given.update(use_cache=True, past_key_values=DynamicCache())
        if case.statistics and odd != "no statistics":
            recording = block.enter_context(watching(model, odd))
        output = decoded = output_of(run(here.shard(text, 1), **given))
        if case.decodes:
            given |= {"position_ids": torch.tensor([[T]])}
            with here.decoding(T):
                decoded = model(TOKEN + (odd == "other token"), **given).logits
        loss = (output * here.shard(slopes, 1)).sum()
        backward = loss.backward
        if case.how == "backward in a thread":
            backward = partial(in_a_thread, loss.backward)
        if case.backward == "inside":
            backward()
    if case.backward == "outside":
        backward()
    assert case.how != "with labels", "a loss across the borders of shards was computed"
    return numbers(model, output, decoded, recording)


def as_drawn(case: Case, model: nn.Module) -> Callable[..., Any]:
    """Return a function that runs the model."""
    match case.how.split():
        case ["compiled", "by", backend]:
            return torch.compile(model, backend=backend)
        case ["in", "a", "thread"]:
            return partial(in_a_thread, model)
        case ["never", *_]:
            model.set_attn_implementation("eager")
        case ["checkpointed,", "reentrant"] | ["checkpointed"]:
            for layer in layers_of(model):
                layer.forward = partial(checkpointed, layer.forward, "reentrant" in case.how)
    return model


def layers_of(model: nn.Module) -> nn.ModuleList:
    return next(part for part in model.modules() if isinstance(part, nn.ModuleList))


def checkpointed(forward: Callable[..., Any], reentrant: bool, *args: Any, **given: Any) -> Any:
    return checkpoint(partial(forward, **given), *args, use_reentrant=reentrant)


def in_a_thread(run: Callable[..., Any], *args: Any, **given: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run, *args, **given).result()


def output_of(answer: Any) -> Tensor:
    return answer if isinstance(answer, Tensor) else answer.logits


class OwnError(Exception):
    """An error on one rank outside clearhead."""


def fail(*given: object) -> None:
    raise OwnError


# ----------------------------------------------------------------------------- right, or refused


def on_rank(rank: int, cases: list[Case]) -> list[tuple[str, str]]:
    """Return this rank's outcome of each case, and of a plain step after it."""
    side = dist.new_group(timeout=timedelta(seconds=60))
    results = []
    for case in cases:
        plain = Case(case.seed, case.world, "attention", backward="inside")
        results.append((outcome(case, rank, side), outcome(plain, rank, side)))
        if "RankLost" in "".join(results[-1]):
            break  # the group cannot be used after that
    return results


def outcome(case: Case, rank: int, side: dist.ProcessGroup) -> str:
    """Return "right", the error, or what is wrong on this rank."""
    expected = in_one_process(case)
    error, errors = "", [""] * case.world
    try:
        found = on_this_rank(case, case.odd if rank == case.world - 1 else "nothing")
    except OwnError:
        error = "its own error"
    except (ch.BadValue, ch.BadType) as refusal:
        error = f"{type(refusal).__name__}: {refusal}"
    except Exception as raw:
        error = f"raw {type(raw).__name__}: {raw}"
    torch._dynamo.reset()
    dist.all_gather_object(errors, error, side)
    if any(errors):
        return error or "went on"
    dist.all_reduce(found.gradients, group=side)
    layout = SCATTERED[case.world] if case.layout == "scattered" else case.layout
    here = ch.distributed.shard(expected.output, None, layout, dim=1)
    off = [far(found.output, here), far(found.gradients, expected.gradients)]
    if case.decodes:
        off += [far(found.decoded, expected.decoded)]
    off += [far(a, b) for a, b in zip(found.statistics, expected.statistics, strict=True)]
    return "right" if all(x < 1e-4 for x in off) else f"off by {', '.join(f'{x:.2g}' for x in off)}"


def far(found: Tensor, right: Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    return float((found - right).abs().max() / right.abs().max().clamp(min=1e-3))


def judge(case: Case, results: list[tuple[str, str]]) -> None:
    """Raise `AssertionError` unless all ranks are right, or all refused the case for its cause."""
    answers, plain_answers = zip(*results, strict=True)
    if set(answers) != {"right"}:
        causes = [CAUSES[x] for x in (case.how, case.odd) if x in CAUSES]
        alone = case.odd in ("skips the step", "fails half way")  # the last rank has its own error
        for text in answers[:-1] if alone else answers:
            message = text.split("\n")[0].lower()
            assert text.startswith(("BadValue", "BadType")), answers
            assert any(cause in message for cause in causes), answers
    assert set(plain_answers) == {"right"}, f"the plain step after it: {plain_answers}"


def check(cases: list[Case], folder: Path) -> None:
    """Raise `AssertionError` for the first case that is neither right nor refused."""
    world = cases[0].world
    for case, *results in zip(cases, *on_processes(world, on_rank, folder, cases), strict=False):
        try:
            judge(case, results)
        except AssertionError as error:
            again = f"python -m tests.properties.test_sharded {world} {case.seed}"
            again += " compiled" * case.how.startswith("compiled")
            raise AssertionError(f"{case}; rerun it: {again}") from error


@pytest.mark.parametrize("world", [2, 3])
def test_the_numbers_of_one_process_or_an_error_on_every_rank(world, tmp_path):
    check([draw(seed, world) for seed in range(12)], tmp_path)


def test_compiled_models(tmp_path):
    check([draw(0, 2, compiled=True)], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [2, 3])
def test_fresh_seeds(world, tmp_path, fresh_seed):
    for n in range(fresh_seed, fresh_seed + 200, 40):
        check([draw(seed, world) for seed in range(n, n + 40)], tmp_path / str(n))
    check([draw(fresh_seed + n, world, compiled=True) for n in range(4)], tmp_path / "compiled")


if __name__ == "__main__":
    world, seed = map(int, sys.argv[1:3])
    with tempfile.TemporaryDirectory() as folder:
        check([draw(seed, world, compiled="compiled" in sys.argv)], Path(folder))
