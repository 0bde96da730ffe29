"""Presses that score keys by statistics, beside those of KVPress on eager attention."""

import pytest
import torch
import transformers

import clearhead as ch

kvpress = pytest.importorskip("kvpress", reason="KVPress is not installed")
ch.hf.register()
T, G, WINDOW = 150, 2, 16


def llama(**more):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=G, initializer_range=0.3, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def qwen3():
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=48, intermediate_size=32, num_hidden_layers=2, head_dim=8,
        num_attention_heads=6, num_key_value_heads=G, initializer_range=0.3,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config).eval()


OURS = {
    "observed": lambda r: ch.hf.press(ch.received(reduce="mean"), r),
    "snap": lambda r: ch.hf.press(
        ch.received(reduce="mean", last=WINDOW), r, window=WINDOW, kernel=5
    ),
    "adaptive": lambda r: kvpress.AdaKVPress(OURS["snap"](r)),
    "critical": lambda r: kvpress.CriticalKVPress(OURS["observed"](r)),
}
THEIRS = {
    "observed": lambda r: kvpress.ObservedAttentionPress(r),
    "snap": lambda r: kvpress.SnapKVPress(r, window_size=WINDOW, kernel_size=5),
    "adaptive": lambda r: kvpress.AdaKVPress(THEIRS["snap"](r)),
    "critical": lambda r: kvpress.CriticalKVPress(THEIRS["observed"](r)),
}


def compressed(model, implementation, press, batch=1):
    """The scores of each layer, the compressed cache, and the logits of the next token."""
    ids = torch.randint(64, (batch, T + 1), generator=torch.Generator().manual_seed(3))
    model.set_attn_implementation(implementation)
    cache, scores, scorer = transformers.DynamicCache(), [], getattr(press, "press", press)
    score = scorer.score

    def recorded(*args):
        scores.append(score(*args))
        return scores[-1].clone()

    scorer.score = recorded
    with torch.no_grad(), press(model):
        at = torch.arange(T)
        model(ids[:, :T], past_key_values=cache, cache_position=at)
        logits = model(ids[:, T:], past_key_values=cache, cache_position=at[-1:] + 1).logits
    return scores, [(x.keys, x.values) for x in cache.layers], logits


@pytest.mark.parametrize("implementation", ["clearhead", "sdpa"])
@pytest.mark.parametrize("make", [llama, qwen3])
@pytest.mark.parametrize("name", ["observed", "snap"])
def test_scores_and_choices_are_those_of_eager(name, make, implementation):
    model = make()
    theirs, kept, logits = compressed(model, "eager", THEIRS[name](0.4), batch=2)
    ours, ours_kept, ours_logits = compressed(model, implementation, OURS[name](0.4), batch=2)
    assert len(ours) == len(theirs) == 2 and ours[0].shape == (2, G, T)
    # A later layer reads what earlier ones wrote, which differs in the last bits.
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        chosen = [x.topk(kept[0][0].shape[2]).indices.sort().values for x in (a, b)]
        assert torch.equal(*chosen)
    for (k, v), (k2, v2) in zip(ours_kept, kept, strict=True):
        assert k.shape[2] < T
        torch.testing.assert_close(k, k2, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(v, v2, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours_logits, logits, rtol=1e-3, atol=1e-3)
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize(("name", "implementation"), [("adaptive", "sdpa"), ("critical", "eager")])
def test_presses_that_take_a_press(name, implementation):
    model, dropped = llama(), []
    _, kept, logits = compressed(model, implementation, THEIRS[name](0.4))
    dropped.append([masked(x.self_attn) for x in model.model.layers])
    _, ours_kept, ours_logits = compressed(model, "sdpa", OURS[name](0.4))
    dropped.append([masked(x.self_attn) for x in model.model.layers])
    for (k, _), (k2, _) in zip(ours_kept, kept, strict=True):
        torch.testing.assert_close(k, k2, rtol=1e-4, atol=1e-4)
    assert dropped[0] == dropped[1] and any(dropped[0]) is (name == "adaptive")
    torch.testing.assert_close(ours_logits, logits, rtol=1e-3, atol=1e-3)


def masked(layer):
    """The keys that AdaKVPress masks: batch, KV head and position."""
    indices = getattr(layer, "masked_key_indices", None)
    return [] if indices is None else sorted(torch.stack(indices, 1).tolist())


class Eager(kvpress.ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return self.of(attentions).unflatten(1, (G, -1)).mean(2)


SUMS = {
    "sum": ("received", lambda w: w.sum(2)),
    "squares": (ch.received(power=2), lambda w: w.square().sum(2)),
    "largest": (ch.received(reduce="max"), lambda w: w.amax(2)),
    "last": (ch.received(last=9), lambda w: w[:, :, -9:].sum(2)),
}


@pytest.mark.parametrize("implementation", ["clearhead", "sdpa"])
@pytest.mark.parametrize("name", SUMS)
def test_statistics_of_a_sliding_window(name, implementation):
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=48, intermediate_size=32, num_hidden_layers=2, sliding_window=30,
        num_attention_heads=6, num_key_value_heads=G, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval()
    statistic, by_eager = SUMS[name]
    eager = Eager(0.4)
    eager.of = by_eager
    theirs, kept, _ = compressed(model, "eager", eager)
    ours, ours_kept, _ = compressed(model, implementation, ch.hf.press(statistic, 0.4))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    for (k, _), (k2, _) in zip(ours_kept, kept, strict=True):
        torch.testing.assert_close(k.sort(2).values, k2.sort(2).values, rtol=1e-4, atol=1e-4)


def test_errors_of_dropped_keys():
    model = llama()
    with torch.no_grad(), ch.watch(model, stats=["drop_error"]) as seen:
        model.set_attn_implementation("clearhead")
        model(torch.randint(64, (1, T + 1), generator=torch.Generator().manual_seed(3))[:, :T])
    scores, kept, _ = compressed(model, "clearhead", ch.hf.press("drop_error", 0.4))
    for a, b in zip(scores, seen, strict=True):
        right = b.drop_error.unflatten(1, (G, -1)).mean(2)
        torch.testing.assert_close(a, right, rtol=1e-4, atol=1e-6)
    assert all(k.shape[2] == pytest.approx(0.6 * T, abs=1) for k, _ in kept)


def test_a_watch_does_not_see_the_second_time():
    model = llama(attn_implementation="clearhead")
    with ch.watch(model, stats=["entropy"]) as seen:
        compressed(model, "clearhead", OURS["observed"](0.5))
    assert [x.entropy.shape[-1] for x in seen] == [T, T, 1, 1]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ch.hf.press("entropy"), "press got 'entropy'."),
        (lambda: ch.hf.press(ch.received("value")), "press got received(by='value')."),
        (lambda: ch.hf.press("received", window=-1), "press got window=-1."),
        (lambda: ch.hf.press("received", kernel=4), "press got kernel=4."),
        (lambda: ch.hf.press("received", 1.0), "press got compression_ratio=1.0."),
    ],
)
def test_errors(make, text):
    with pytest.raises(ch.BadValue) as error:
        make()
    assert str(error.value).startswith(text)


RUNS = {
    "eager": (
        "eager",
        lambda: OURS["observed"](0.5),
        "press got a 'eager' attention, with a mask of torch.float32.",
    ),
    "chunks": (
        "sdpa",
        lambda: kvpress.ChunkPress(OURS["observed"](0.5), chunk_length=32),
        "press got 32 keys of 150 tokens, and window=0.",
    ),
    "short": (
        "sdpa",
        lambda: ch.hf.press("received", 0.5, window=T),
        "press got 150 keys of 150 tokens, and window=150.",
    ),
}


@pytest.mark.parametrize("run", RUNS)
def test_errors_of_a_run(run):
    implementation, make, text = RUNS[run]
    with pytest.raises(ch.BadValue) as error:
        compressed(llama(), implementation, make())
    assert str(error.value).startswith(text)


def test_edits_are_refused():
    model = llama(attn_implementation="clearhead")
    with (
        ch.intervene(model, [ch.edits.scale(0.5, layers=[0])]),
        pytest.raises(ch.BadValue, match="A press ran inside intervene"),
    ):
        compressed(model, "clearhead", OURS["observed"](0.5))
