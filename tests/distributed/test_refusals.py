"""`sharded` raises an error on every rank for what it cannot compute, and the group works on."""

import contextvars
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import clearhead as ch
from clearhead.distributed import RankLost, local, shard, sharded
from tests.distributed.processes import on_processes
from tests.hf.test_models import build

T = 24


def layer() -> ch.nn.MultiHeadAttention:
    torch.manual_seed(0)
    return ch.nn.MultiHeadAttention(32, 4, kv_heads=2, causal=True)


def text(seed: int = 1) -> torch.Tensor:
    return torch.randn(1, T, 32, generator=torch.Generator().manual_seed(seed))


def block(**keywords):
    return sharded(T, layout="head-tail", timeout=20, **keywords)


def error_of(do: Callable[[], object]) -> str:
    try:
        do()
    except ch.AttentionError as error:
        return error.gave
    return "nothing"


def in_a_thread(run: Callable[[], object], context: contextvars.Context | None = None) -> object:
    result = SimpleNamespace(error=None, value=None)

    def catch() -> None:
        try:
            result.value = run()
        except BaseException as error:
            result.error = error

    thread = threading.Thread(target=catch if context is None else lambda: context.run(catch))
    thread.start()
    thread.join()
    if result.error:
        raise result.error
    return result.value


def inside(run: Callable[..., object], **keywords) -> Callable[[], None]:
    """Return a function that calls `run(here)` in a block."""

    def do() -> None:
        with block(**keywords) as here:
            run(here)

    return do


def steps(rank: int) -> dict[str, str]:
    """Return the error of a rank in each of these blocks."""
    model, x = layer(), text()
    other = layer()
    both = torch.nn.ModuleList([model, other])

    def call(here) -> torch.Tensor:
        return model(here.shard(x, -2))

    class Some(torch.nn.Module):  # drops another layer on each rank
        def __init__(self) -> None:
            super().__init__()
            self.layers = both

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[rank](x)

    def in_other_thread(here) -> None:
        in_a_thread(lambda: call(here))

    def in_copied_context(here) -> None:
        in_a_thread(lambda: call(here), contextvars.copy_context())

    def swallowed(here) -> None:
        call(here)
        error_of(lambda: in_other_thread(here))

    def one_fails(here) -> None:
        if rank == 1:
            raise KeyError("a bad batch")
        call(here)

    def one_fails_after(here) -> None:
        call(here)
        if rank == 1:
            raise KeyError("a bad batch")

    def one_skips_the_last(here) -> None:
        call(here)
        if rank == 0:
            call(here)

    def one_skips_all(here) -> None:
        if rank == 0:
            call(here)

    def one_in_a_thread(here) -> None:
        in_other_thread(here) if rank == 1 else call(here)

    cases = {
        "thread": in_other_thread,
        "copied context": in_copied_context,
        "swallowed": swallowed,
        "layer": lambda here: Some()(here.shard(x, -2)),
        "no call": lambda here: here.shard(x, -2),
        "one fails": one_fails,
        "one fails after": one_fails_after,
        "one skips the last": one_skips_the_last,
        "one skips all": one_skips_all,
        "one in a thread": one_in_a_thread,
        "other text": lambda here: model(here.shard(text(rank), -2)),
        "other ids": lambda here: (here.shard(torch.arange(T) + rank), call(here)),
        "only one cuts": lambda here: model(
            shard(x, None, "head-tail", -2) if rank else here.shard(x, -2)
        ),
        "func": lambda here: torch.func.vmap(model)(here.shard(x, -2)[None]),
        "all right": call,
    }
    found = {}
    with torch.no_grad():
        for name, run in cases.items():
            try:
                found[name] = error_of(inside(run))
            except KeyError:
                found[name] = "its own KeyError"
        one = model(x)
        with block() as here:
            found["off"] = float((call(here) - here.shard(one, -2)).abs().max())
            there = in_a_thread(lambda: call(here), contextvars.copy_context())
            found["off in a thread"] = float((there - here.shard(one, -2)).abs().max())
            context = contextvars.copy_context()
        found["late"] = error_of(lambda: in_a_thread(lambda: call(here), context))
    return found


def test_calls_that_ranks_cannot_make_together_are_refused(tmp_path):
    here, there = on_processes(2, steps, tmp_path)
    threads = "Attention was called in the thread 'Thread-"
    for found in (here, there):
        assert found["thread"].startswith(threads)
        assert found["copied context"] == "nothing"
        assert found["swallowed"].startswith(threads)
        assert found["layer"] == (
            "The ranks made different calls: layer is layers.1 on rank 1, and layers.0 on rank 0."
        )
        assert found["no call"].startswith("No attention call went through clearhead inside")
        assert found["one skips the last"].startswith("The ranks made different calls: call is ")
        for name in ("other text", "other ids"):
            assert found[name] == "part.shard got another tensor on rank 1 than on rank 0."
        assert found["func"].startswith("Attention over ranks was called inside torch.func")
        assert found["only one cuts"] == "nothing"
        assert found["all right"] == "nothing"
        assert found["off"] < 1e-5 and found["off in a thread"] < 1e-5
        assert found["late"].startswith(threads)
    left = "Rank 1 left its block of distributed.sharded: "
    assert here["one fails"] == here["one fails after"] == f"{left}KeyError('a bad batch')"
    assert there["one fails"] == there["one fails after"] == "its own KeyError"
    assert here["one skips all"].startswith(f"{left}No attention call went through clearhead")
    assert there["one skips all"].startswith("No attention call went through clearhead")
    assert here["one in a thread"].startswith(f"{left}Attention was called in the thread")
    assert there["one in a thread"].startswith(threads)


def at_the_same_time(rank: int, store: str) -> list[str]:
    """Return the errors of two threads, of which one computes while the other calls attention."""
    model, x, errors = layer(), text(), ["", ""]
    meeting = dist.FileStore(store, 2)
    begun, goes_on, computed = threading.Event(), threading.Event(), local.attend

    def waits(*passed: object) -> object:
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            goes_on.wait(20)
        return computed(*passed)

    local.attend = waits
    with pytest.raises(ch.BadValue), block() as here, torch.no_grad():

        def call(n: int) -> None:
            errors[n] = error_of(lambda: model(here.shard(x, -2)))

        other = threading.Thread(target=contextvars.copy_context().run, args=(call, 1))
        other.start()
        begun.wait(20)
        # Else one rank could close the group while the thread of the other compares its call, or
        # that thread could miss the reason, which is not stored yet.
        meeting.set(f"begun {rank}", "")
        meeting.wait(["begun 0", "begun 1"])
        call(0)
        meeting.set(f"refused {rank}", "")
        meeting.wait(["refused 0", "refused 1"])
        goes_on.set()
        other.join()
    return errors


def test_two_threads_at_the_same_time_are_refused(tmp_path):
    store = str(tmp_path / "refused")
    for main, other in on_processes(2, at_the_same_time, tmp_path, store):
        two = "Two threads called attention over the ranks of one group at the same time."
        assert main == two and (other == "nothing" or two in other)  # it had all that it needed


# ------------------------------------------------------------------------- models of transformers


def models(rank: int) -> dict[str, object]:
    found: dict[str, object] = {}
    ids = torch.randint(1, 97, (1, T), generator=torch.Generator().manual_seed(3))

    def error_with(run: Callable[..., object], *given: str) -> str:
        """Return the error for a model with positions or labels."""
        kept = []

        def do(here) -> None:
            mine = {"position_ids": here.positions[None], "labels": here.shard(ids)}
            mine["shift_labels"] = here.shard(ids.roll(-1, 1))
            chosen = {name: mine[name] for name in given}
            kept.append(run(here.shard(ids), use_cache=False, **chosen))

        return error_of(inside(do))

    for kind in ("llama", "gpt2"):
        model = build(kind, "AutoModelForCausalLM").eval()
        model.set_attn_implementation("clearhead")
        found[kind, "no positions"] = error_with(model)
        found[kind, "base"] = error_with(model.base_model)
        found[kind, "labels"] = error_with(model, "position_ids", "labels")
        both = "labels", "shift_labels"
        found[kind, "shifted labels"] = error_with(model, "position_ids", *both)
        found[kind, "right"] = error_with(model, "position_ids")
    return found


def test_models_need_positions_and_no_labels(tmp_path):
    for found in on_processes(2, models, tmp_path):
        for kind in ("llama", "gpt2"):
            none = "The model got no position_ids inside distributed.sharded."
            assert none in found[kind, "no positions"]
            assert none in found[kind, "base"]
            for what in ("labels", "shifted labels"):
                assert "The model got labels= inside" in found[kind, what]
            assert found[kind, "right"] == "nothing"


def decoded(rank: int) -> list[str]:
    from transformers import DynamicCache

    model = build("llama", "AutoModelForCausalLM").eval()
    model.set_attn_implementation("clearhead")
    ids = torch.randint(1, 97, (1, T), generator=torch.Generator().manual_seed(3))

    def step(token: int, **keywords) -> Callable[[], object]:
        def run(here) -> None:
            cache = DynamicCache()
            model(here.shard(ids), position_ids=here.positions[None], past_key_values=cache)
            with here.decoding(T):
                model(torch.tensor([[token]]), past_key_values=cache, **keywords)

        return inside(run)

    at = torch.tensor([[T]])
    with torch.no_grad():
        return [
            error_of(step(5 + rank, position_ids=at)),
            error_of(step(5)),
            error_of(step(5, position_ids=at)),
        ]


def generated(rank: int) -> dict[str, str]:
    from transformers import DynamicCache

    model = build("llama", "AutoModelForCausalLM").eval()
    model.set_attn_implementation("clearhead")
    model.generation_config.pad_token_id = 0
    ids = torch.randint(1, 97, (1, T), generator=torch.Generator().manual_seed(3))
    ids[0, 5] = 0  # generate takes it for padding
    greedy = dict(do_sample=False, max_new_tokens=2)

    def from_shard(here) -> None:
        model.generate(here.shard(ids), position_ids=here.positions[None], **greedy)

    def one_token(here) -> None:
        whole = here.shard(ids).clamp(min=1)
        model.generate(whole, position_ids=here.positions[None], max_new_tokens=1)

    def while_decoding(here, masked: bool, generates: bool) -> None:
        cache, mine = DynamicCache(), here.shard(ids)
        model(mine, position_ids=here.positions[None], past_key_values=cache)
        longer = torch.cat([mine, torch.tensor([[5]])], 1)
        mask = torch.ones_like(longer) if masked else None
        with here.decoding(T):
            if generates:
                model.generate(longer, attention_mask=mask, past_key_values=cache, **greedy)
            else:
                at = torch.tensor([[T]])
                one = longer[:, -1:]
                model(one, attention_mask=mask, position_ids=at, past_key_values=cache)

    cases = {
        "shard": from_shard,
        "one token": one_token,
        "generate": partial(while_decoding, masked=False, generates=True),
        "generate with a mask": partial(while_decoding, masked=True, generates=True),
        "step with a mask": partial(while_decoding, masked=True, generates=False),
    }

    def padded(here) -> None:  # behind this rank's columns of a mask of the whole text
        mask = (torch.arange(T) < T - 1).long()[None]
        model(here.shard(ids), attention_mask=mask, position_ids=here.positions[None])

    with torch.no_grad():
        return {name: error_of(inside(run)) for name, run in (cases | {"padded": padded}).items()}


def test_generate_is_refused_for_what_it_is(tmp_path):
    for found in on_processes(2, generated, tmp_path):
        assert found.pop("step with a mask") == "nothing"
        assert found.pop("padded").startswith("The model's attention_mask has zeros")
        assert set(found.values()) == {"generate() of transformers ran inside distributed.sharded."}


def test_ranks_decode_the_same_tokens(tmp_path):
    for found in on_processes(2, decoded, tmp_path):
        assert found[0] == "The new queries of rank 1 differ from those of rank 0."
        assert "The model got no position_ids" in found[1]
        assert found[2] == "nothing"


# ------------------------------------------------------------------------- arguments and contents


def contents(rank: int) -> dict[str, str]:
    whole = torch.randn(1, 4, T, 8, generator=torch.Generator().manual_seed(1))
    x = shard(whole)
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4 + 1e-6 * rank])
    ask, look = ch.distributed.attention, ch.distributed.look
    keywords: dict[str, dict] = {
        "sinks": dict(sinks=torch.tensor([0.0, 1.0, 2.0, 3.0 + 1e-6 * rank])),
        "slopes": dict(bias=ch.alibi(slopes)),
        "bias keys": dict(bias=torch.zeros(len(x[0, 0]), [T, 1][rank])),
        "bias rows": dict(bias=torch.zeros([12, T][rank], T)),
        "mask": dict(mask=ch.documents(torch.arange(T) * (torch.arange(T) != T - 1 - rank))),
    }
    found = {
        name: error_of(lambda kw=kw: ask(x, x, x, timeout=20, **kw))
        for name, kw in keywords.items()
    }
    for name, statistic in {
        "exact_rows": ch.exact_rows([*range(3, 20), 20 + rank]),
        "mass": ch.mass({"far": ch.prefix(3 + rank)}),
        "pooled": ch.pooled(4 - rank, 4),
        "topk": ch.topk(2 + rank),
    }.items():
        found[name] = error_of(
            lambda s=statistic: look(x, x, x, stats=[s], gather=True, timeout=20)
        )
    found["after"] = error_of(lambda: ask(x, x, x, timeout=20))
    return found


def test_contents_are_compared(tmp_path):
    here, there = on_processes(2, contents, tmp_path)
    for name, what in (("sinks",) * 2, ("slopes", "bias"), ("bias keys", "bias"), ("mask",) * 2):
        assert here[name] == there[name]
        assert here[name].startswith(f"The ranks made different calls: {what} is ")
    for name in ("exact_rows", "mass", "pooled", "topk"):
        assert here[name] == there[name]
        assert here[name].startswith(f"The ranks made different calls: stats is ({name}(")
    assert here["bias rows"].startswith(
        "Rank 1 raised an error in its call: The bias has 24 rows of queries"
    )
    assert here["after"] == there["after"] == "nothing"


def failing(rank: int, where: str) -> list[str]:
    whole = torch.randn(1, 4, T, 8, generator=torch.Generator().manual_seed(1))
    q, k, v = (shard(whole).requires_grad_() for _ in range(3))
    ask = ch.distributed.attention

    def fail(*given: object) -> None:
        raise MemoryError("no room")

    found = []
    kept, name = getattr(local, where), where
    if rank == 1:
        setattr(local, name, fail)
    try:
        ask(q, k, v, timeout=60).sum().backward()
        found.append("nothing")
    except (RankLost, MemoryError) as error:
        found.append(str(error))
    setattr(local, name, kept)
    x = shard(whole[:, :3, :, :5])  # another size
    found.append(error_of(lambda: ask(x, x, x, timeout=60)))
    return found


@pytest.mark.parametrize("where", ["attend", "gradients"])
def test_an_error_inside_a_call_closes_the_group_on_every_rank(where, tmp_path):
    here, there = on_processes(2, failing, tmp_path, where)
    assert there[0] == "no room"
    if here[0] != "nothing":  # it had all that it needed, or got the reason
        assert "it failed with MemoryError('no room')" in here[0]
    for found in (here, there):
        assert "The process group was closed" in found[1] or "failed with Mem" in found[1]
