"""Paths from head to head: what eager attention gives with hooks, run by run (Wang et al. 2022)."""

from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

import clearhead as ch
from clearhead.core.errors import BadType, BadValue
from tests.hf.test_patch import check, hooked, inputs
from tests.pairs import pairs

KINDS = ["gpt2", "llama", "gemma2", "gemma3", "gpt_neox"]
LAYERS, READS = 4, {"query": 2, "key": 1, "value": 1}  # the head of the receiver


@cache
def model_of(kind):
    import transformers as t

    sizes = {
        "gpt2": lambda: t.GPT2Config(vocab_size=97, n_embd=32, n_layer=LAYERS, n_head=4),
        "llama": lambda: t.LlamaConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=37, pad_token_id=0,
        ),
        "gpt_neox": lambda: t.GPTNeoXConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4,
            intermediate_size=37, use_parallel_residual=True,
        ),
        "gemma2": lambda: t.Gemma2Config(
            vocab_size=97, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=37, pad_token_id=0, head_dim=8,
            sliding_window=5, attn_logit_softcapping=2.0,
        ),
        "gemma3": lambda: t.Gemma3TextConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=37, pad_token_id=0, head_dim=8,
            sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2,
        ),
    }  # fmt: skip
    ch.hf.register()
    torch.manual_seed(0)
    config = sizes[kind]()
    model = t.AutoModelForCausalLM.from_config(config, attn_implementation="clearhead").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(10.0 if kind == "gpt2" else 4.0) if p.dim() > 1 else p.add_(torch.rand_like(p))
    return model


@torch.no_grad()
def by_hooks(model, kind, sender, receiver, of, positions, mine, others):
    """The logits of the run in which only the path is changed."""
    layer, head = sender
    model.set_attn_implementation("eager")

    def run(given, *changes):
        with ExitStack() as hooks:
            for at, part, change in changes:
                hooks.enter_context(hooked(model, kind, at, part, change))
            return model(**given).logits

    def recorder(into):
        def record(x):
            into.append(x.clone())
            return x

        return record

    def replaced_by(y, heads=slice(None), columns=slice(None)):
        def replace(x):
            x[:, columns, heads] = y[0][:, columns, heads]
            return x

        return replace

    clean, other, received = {at: [] for at in range(LAYERS)}, [], []
    run(mine, *((at, "output", recorder(clean[at])) for at in clean))
    run(others, (layer, "output", recorder(other)))
    frozen = [(at, "output", replaced_by(clean[at])) for at in range(layer + 1, receiver[0])]
    sent = (layer, "output", replaced_by(other, head))
    run(mine, sent, *frozen, (receiver[0], of, recorder(received)))

    def read(x):
        """`positions` are the same for all texts, or listed for each."""
        for b in range(len(x)):
            every = range(x.shape[1]) if positions is None else positions
            columns = every[b] if isinstance(every[0], list) else list(every)
            x[b, columns, receiver[1]] = received[0][b, columns, receiver[1]]
        return x

    logits = run(mine, (receiver[0], of, read))
    model.set_attn_implementation("clearhead")
    return logits


def edit_of(model, sender, receiver, of, others, **where):
    layer, head = sender
    with torch.no_grad(), ch.watch(model, stats=[], outputs=True, layers=[layer]) as recording:
        model(**others)
    change = ch.edits.patch(recording, layers=[layer], heads=[head])
    return ch.edits.path(change, receiver, of, **where)


@pytest.mark.parametrize(
    ("kind", "layers", "of", "positions", "padding"),
    pairs(KINDS, [(0, 3), (1, 2)], READS, [None, [4, 10]], ["none", "left", "right"]),
)
def test_as_hooks_on_eager_attention(kind, layers, of, positions, padding):
    model, receiver = model_of(kind), (layers[1], READS[of])
    (mine, real), (others, _) = (inputs(kind, seed, padding) for seed in (1, 2))
    columns = positions
    if positions is not None and padding != "none":  # the second text has 8 tokens
        positions, columns = [4, 7], [[4, 7], [7, 10] if padding == "left" else [4, 7]]
    sender = layers[0], 3
    right = by_hooks(model, kind, sender, receiver, of, columns, mine, others)
    edit = edit_of(model, sender, receiver, of, others, positions=positions)
    with torch.no_grad():
        plain = model(**mine).logits
        patch = edit.as_patch(model, mine)
        with ch.intervene(model, [patch]) as done:
            logits = model(**mine).logits
    assert done.times(0) == 1 and "path" in repr(edit)
    check(*(x[real] for x in (logits, right, plain)))


@torch.no_grad()
def test_in_float64_the_only_difference_is_rounding():
    model = deepcopy(model_of("gpt2")).double()  # the other models compute norms in float32
    (mine, _), (others, _) = (inputs("gpt2", seed, "right") for seed in (1, 2))
    for of, head in READS.items():
        right = by_hooks(model, "gpt2", (0, 3), (3, head), of, None, mine, others)
        edit = edit_of(model, (0, 3), (3, head), of, others).as_patch(model, mine)
        with ch.intervene(model, [edit]):
            torch.testing.assert_close(model(**mine).logits, right, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_value_at_a_named_position_is_changed_in_every_step_of_a_generation():
    model = model_of("llama")
    (mine, _), (others, _) = (inputs("llama", seed, "none") for seed in (1, 2))
    edit = edit_of(model, (0, 3), (2, 1), "value", others, positions=[2])
    steps = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    steps |= {"output_logits": True, "return_dict_in_generate": True}
    with ch.intervene(model, [edit.as_patch(model, mine)]) as done:
        found = model.generate(**mine, **steps)
    assert done.times(0) == 3
    for step, logits in enumerate(found.logits):  # without a cache, on the text so far
        text, other = found.sequences[:, : 11 + step], others["input_ids"]
        whole = {"input_ids": text}, {"input_ids": torch.cat([other, text[:, 11:]], 1)}
        right = by_hooks(model, "llama", (0, 3), (2, 1), "value", [2], *whole)[:, -1]
        check(logits, right, model(text).logits[:, -1])


@torch.no_grad()
def test_queries_of_a_prompt_do_not_fit_the_steps_of_a_generation():
    model = model_of("llama")
    (mine, _), (others, _) = (inputs("llama", seed, "none") for seed in (1, 2))
    patch = edit_of(model, (0, 3), (2, 1), "query", others).as_patch(model, mine)
    with ch.intervene(model, [patch]), pytest.raises(BadValue, match=r"Tq, D|\(1, 8\)"):
        model.generate(**mine, max_new_tokens=2, do_sample=False, pad_token_id=0)


@torch.no_grad()
def test_after_a_cache_only_new_tokens_are_sent_and_read():
    from transformers import DynamicCache

    model = model_of("llama")
    tokens = inputs("llama", 1, "none")[0]["input_ids"]

    past = DynamicCache(config=model.config)
    model(tokens[:, :7], past_key_values=past)
    rest = {"input_ids": tokens[:, 7:], "past_key_values": past}

    edit = ch.edits.path(ch.edits.zero_ablate(layers=[0], heads=[3]), (2, 1), "key")
    patch = edit.as_patch(model, rest)
    assert past.get_seq_length() == 7  # the runs read copies
    with ch.intervene(model, [patch]):
        found = model(**rest).logits

    def zero(x):
        x[:, 7:, 3] = 0
        return x

    keys, clean = [], []
    model.set_attn_implementation("eager")
    with hooked(model, "llama", 1, "output", lambda x: clean.append(x.clone()) or x):
        plain = model(tokens).logits[:, 7:]
    with ExitStack() as hooks:  # without a cache, whose keys of earlier tokens stay
        hooks.enter_context(hooked(model, "llama", 0, "output", zero))
        hooks.enter_context(hooked(model, "llama", 1, "output", lambda x: clean[0]))
        hooks.enter_context(hooked(model, "llama", 2, "key", lambda x: keys.append(x) or x))
        model(tokens)

    def read(x):
        x[:, 7:, 1] = keys[0][:, 7:, 1]
        return x

    with hooked(model, "llama", 2, "key", read):
        right = model(tokens).logits[:, 7:]
    model.set_attn_implementation("clearhead")
    check(found, right, plain)


@pytest.mark.parametrize("at_once", [1, 4])
def test_effects_of_paths_alone_and_as_copies(at_once):
    model = model_of("llama")
    mine, others = (
        {"input_ids": inputs("llama", seed, "none")[0]["input_ids"][:1]} for seed in (1, 2)
    )
    metric = ch.logit_difference(5, 7)
    names = {(layer, head): f"{layer}.{head}" for layer in range(3) for head in range(4)}
    edits = {
        name: edit_of(model, sender, (3, 2), "query", others) for sender, name in names.items()
    }
    result = ch.effects(model, mine, metric, edits, estimate=True, at_once=at_once, progress=False)
    for effect, sender in zip(result, names, strict=True):
        right = by_hooks(model, "llama", sender, (3, 2), "query", None, mine, others)
        right = float(metric(right)) - result.baseline
        assert effect.exact == pytest.approx(right, abs=2e-5) and effect.estimate is None
        assert (effect.layer, effect.head) == sender
    assert max(abs(e.exact) for e in result) > 1e-3 and result.grid().shape == (3, 4)


def test_a_sweep_over_senders_and_receivers(tmp_path):
    model, file = model_of("llama"), tmp_path / "effects.jsonl"
    mine, others = (
        {"input_ids": inputs("llama", seed, "none")[0]["input_ids"][:1]} for seed in (1, 2)
    )
    with torch.no_grad(), ch.watch(model, stats=[], outputs=True) as other:
        model(**others)
    metric, runs = ch.logit_difference(5, 7), []
    sweep = {
        "edits": ch.edits.path(ch.edits.patch(other, heads=[3, 1]), [(1, 0), (3, 1)], "key"),
        "over": ("layers", "heads", "receivers"),
        "to": file,
        "estimate": False,
        "progress": False,
    }
    result = ch.effects(model, mine, metric, **sweep)
    senders = [(layer, head) for layer in range(3) for head in (1, 3)]
    paths = {(*one, receiver) for one in senders for receiver in [(1, 0), (3, 1)] if one < receiver}
    assert {(e.layer, e.head, e.receiver) for e in result} == paths and len(result) == len(paths)
    assert result.effects[0].name == "L0H1 to L1H0"
    for effect in result:
        sender = effect.layer, effect.head
        right = by_hooks(model, "llama", sender, effect.receiver, "key", None, mine, others)
        assert effect.exact == pytest.approx(float(metric(right)) - result.baseline, abs=2e-5)
    assert result.grid()[2, 3].isnan().tolist() == [True, False]
    assert result.grid().shape == (3, 4, 2) and result.receivers == ((1, 0), (3, 1))

    hook = register_module_forward_pre_hook(  # a hook of the model itself makes it another one
        lambda module, args: runs.append(1) if module is model else None
    )
    assert ch.effects(model, mine, metric, **sweep).effects == result.effects
    hook.remove()
    assert len(runs) == 4  # unedited, and the two largest effects again with a run that paths need

    pytest.importorskip("matplotlib")
    (ax, *_) = ch.views.plot.effects(result).axes
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("sender", "receiver")
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"L{a}H{b}" for a, b in senders]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["L1H0", "L3H1"]


@pytest.mark.parametrize(("of", "heads"), [("query", 4), ("value", 2)])
def test_a_sweep_over_all_receivers(of, heads):
    model = model_of("llama")
    sender = ch.edits.zero_ablate(layers=[1], heads=[2])
    result = ch.effects(
        model, torch.tensor([[3, 4, 5, 6]]), ch.logit_difference(5, 7),
        ch.edits.path(sender, None, of), over=["receivers"], estimate=False, progress=False,
    )  # fmt: skip
    assert [e.receiver for e in result] == [(n, h) for n in (2, 3) for h in range(heads)]
    assert result.axes == ("layer", "head", "receiver") and all(e.exact for e in result)


def test_other_edits_of_the_list_apply_in_all_runs():
    """A head that is cut stays cut in the unedited run and in that of the sender."""
    model = model_of("gpt2")
    (mine, _), (others, _) = (inputs("gpt2", seed, "none") for seed in (1, 2))
    cut = ch.edits.ablate(layers=[1], heads=[0])
    edit = edit_of(model, (0, 3), (3, 1), "value", others)
    metric = ch.logit_difference(5, 7)
    both = ch.effects(model, mine, metric, {"both": [cut, edit], "cut": cut}, estimate=False,
                      progress=False)  # fmt: skip

    def zero(x):
        x[:, :, 0] = 0
        return x

    with hooked(model, "gpt2", 1, "output", zero):
        right = by_hooks(model, "gpt2", (0, 3), (3, 1), "value", None, mine, others)
    assert both.effects[0].exact == pytest.approx(float(metric(right)) - both.baseline, abs=2e-5)
    assert abs(both.effects[0].exact - both.effects[1].exact) > 1e-3


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        (lambda: ch.edits.path((0, 1), (1, 0), "query"), BadType, "as its sender"),
        (
            lambda: ch.edits.path(ch.edits.ablate(), (1, 0), "query").ends(),
            BadValue,
            "of one layer",
        ),
        (
            lambda: ch.edits.path(ch.edits.ablate(layers=[0]), None, "key").ends(),
            BadValue,
            "one rec",
        ),
        (lambda: to((0, 0)), BadValue, "sender in layer 0 and a receiver in layer 0"),
        (lambda: to(3), BadType, "receiver=3"),
        (lambda: to((1, 0), "output"), BadValue, "of='output'"),
        (lambda: ch.intervene(model_of("gpt2"), [to((1, 0))]).__enter__(), BadValue, "as_patch"),
        (lambda: to((9, 0)).as_patch(model_of("gpt2"), torch.tensor([[3, 4]])), BadValue, "layers"),
        (lambda: to((1, 3), "key").as_patch(model_of("llama"), torch.tensor([[3, 4]])), None, ""),
    ],
)
def test_errors_have_three_parts(wrong, kind, says):
    if kind is None:  # the head is compared when the patch applies
        with pytest.raises(BadValue, match="2 key heads"):
            with ch.intervene(model_of("llama"), [wrong()]):
                model_of("llama")(torch.tensor([[3, 4]]))
        return
    with pytest.raises(kind, match=says) as error:
        wrong()
    assert error.value.rule.endswith(".") and error.value.hint.endswith(".")


def test_runs_that_differ_are_refused():
    """With dropout, the receiver would read the noise between two runs."""
    model = model_of("gpt2").train()
    try:
        with pytest.raises(BadValue, match=r"draws random numbers(.|\n)*model\.eval\(\)"):
            to((2, 0)).as_patch(model, torch.tensor([[3, 4, 5]]))
    finally:
        model.eval()


def to(receiver, of="query"):
    return ch.edits.path(ch.edits.ablate(layers=[0], heads=[1]), receiver, of)


def test_a_receiver_in_a_layer_that_does_not_exist():
    model, (mine, _) = model_of("llama"), inputs("llama", 0, "none")
    far = ch.edits.path(ch.edits.ablate(layers=[0], heads=[1]), (LAYERS + 2, 0), "query")
    for layer in (0, LAYERS + 1):  # with layers between sender and receiver, and without
        far = replace(far, sender=ch.edits.ablate(layers=[layer], heads=[1]))
        with pytest.raises(BadValue) as error:
            far.as_patch(model, mine)
        assert "path got receiver=(6, 0).\n  Rule: a layer is an attention call" in str(error.value)
        assert "layers 0 to 3" in str(error.value) and "in one of these" in str(error.value)
