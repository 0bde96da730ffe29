"""Time SmolLM2-135M with clearhead and sdpa: forward, steps of generation, and a training step.

It needs transformers, and the file that `python examples/smollm2.py` fetches; without them the
result has the reason. The peer "without attention" passes values on in place of their weighted
sums, so the time that it lacks is the time of attention.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from clearhead import hf
from examples.smollm2 import cached

WITHOUT, NOTHING = "without attention", "bench_nothing"
CACHED = "clearhead, hf.cache"
DTYPES = (torch.float32, torch.bfloat16)
FORWARD, GENERATION, TRAINING = (64, 1024, 4096), (16, 2048), (256,)
NEW = 16  # tokens of a generation
LONG, MOST_ROUNDS = 3.0, 8  # seconds of a call that is timed once in a round; most times in one
COUNT = len(DTYPES) * len(FORWARD + GENERATION + TRAINING)

Run = Callable[[], Any]


def smollm2(rounds: int, threads: int) -> Iterator[dict[str, Any]]:
    try:
        import transformers  # noqa: F401 (is it installed?)
    except ImportError as missing:
        yield _declined(f"not installed: {missing.name}")
        return
    if not cached().is_file():
        yield _declined("not fetched: python examples/smollm2.py")
        return
    model: Any = hf.Checkpoint(cached()).predictor
    for dtype in DTYPES:
        yield from of_model(model.to(dtype), rounds, threads)


def of_model(
    model: Any,
    rounds: int,
    threads: int,
    forward: tuple[int, ...] = FORWARD,
    generation: tuple[int, ...] = GENERATION,
    training: tuple[int, ...] = TRAINING,
) -> Iterator[dict[str, Any]]:
    """Time a model of transformers on these numbers of tokens."""
    _register_without_attention()
    _check(model, forward[0])
    dtype = str(model.dtype).removeprefix("torch.")
    for make, lengths, work in (
        (_forward, forward, "a forward of {} tokens"),
        (_steps, generation, f"{NEW} tokens after {{}}"),
        (_training, training, "a training step of {} tokens"),
    ):
        for T in lengths:
            names = ("clearhead", *[CACHED] * (make is _steps), "sdpa", WITHOUT)
            with torch.no_grad():
                runs = {name: make(model, name, _ids(model, T)) for name in names}
            case = f"SmolLM2 {dtype}, {work.format(T)}"
            tokens = NEW if make is _steps else T
            yield _measure(model, case, runs, tokens, rounds, threads)


def _ids(model: Any, T: int) -> Tensor:
    generator = torch.Generator().manual_seed(T)
    return torch.randint(3, model.config.vocab_size, (1, T), generator=generator)


def _use(model: Any, name: str) -> None:
    model.set_attn_implementation({CACHED: "clearhead", WITHOUT: NOTHING}.get(name, name))


def _forward(model: Any, name: str, ids: Tensor) -> Run:
    return torch.no_grad()(lambda: model.base_model(ids, use_cache=False))


def _steps(model: Any, name: str, ids: Tensor) -> Run:
    """Return a run of steps on a filled cache, which removes their tokens from it again."""
    import transformers

    _use(model, name)
    cache = hf.cache(model) if name == CACHED else transformers.DynamicCache(config=model.config)
    model.base_model(ids, past_key_values=cache)

    @torch.no_grad()
    def run() -> None:
        token = ids[:, :1]
        for _ in range(NEW):
            token = model(token, past_key_values=cache).logits.argmax(-1)
        cache.crop(-NEW)

    return run


def _training(model: Any, name: str, ids: Tensor) -> Run:
    @torch.enable_grad()
    def run() -> None:
        model(ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    return run


def _measure(
    model: Any, case: str, runs: dict[str, Run], tokens: int, rounds: int, threads: int
) -> dict[str, Any]:
    clock = time.process_time if threads == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = [*runs]

    def time_each() -> None:
        for name in names:
            _use(model, name)
            start = clock()
            runs[name]()
            seconds[name].append(clock() - start)
        names.append(names.pop(0))  # each peer follows others

    time_each()
    more = min(MOST_ROUNDS, max(1, int(LONG / seconds[names[-1]][0])))
    for _ in range(rounds * more - 1):
        time_each()
    ours = seconds["clearhead"]
    peers = {
        name: {
            "seconds": statistics.median(times),
            "rate": tokens / statistics.median(times),
            "times ours": statistics.median(t / o for t, o in zip(times, ours, strict=True)),
        }
        for name, times in seconds.items()
    }
    return {
        "case": case,
        "unit": "tokens/s",
        "declined": {},
        "peers": peers,
        "attention": 1 - peers[WITHOUT]["times ours"],
    }


def _check(model: Any, T: int) -> None:
    """Check that clearhead and sdpa compute the same hidden states, within their dtype."""
    states = []
    for name in ("clearhead", "sdpa"):
        _use(model, name)
        states.append(_forward(model, name, _ids(model, T))().last_hidden_state.float())
    error = float((states[0] - states[1]).norm() / states[1].norm())
    assert error < (1e-4 if model.dtype == torch.float32 else 0.05), f"relative error {error:.1e}"


def _register_without_attention() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    hf.register()
    AttentionInterface.register(NOTHING, _values)
    AttentionMaskInterface.register(NOTHING, lambda *args, **keywords: None)


def _values(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, **keywords: Any) -> Any:
    """Return a value for every query, (B, Tq, H, D), and no weights."""
    last = v[:, :, v.shape[2] - q.shape[2] :]
    return last.repeat_interleave(q.shape[1] // v.shape[1], 1).transpose(1, 2).contiguous(), None


def _declined(reason: str) -> dict[str, Any]:
    names = dict.fromkeys(("clearhead", "sdpa"), reason)
    return {"case": "SmolLM2", "unit": "tokens/s", "declined": names, "peers": {}}
