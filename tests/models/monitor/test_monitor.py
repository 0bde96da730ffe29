"""`monitor` equals dense attention in float64 over all micro-batches of a step."""

import gc
import math
import struct
import subprocess
import sys
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import clearhead as ch
from clearhead.distributed import sharded
from tests.distributed.processes import on_processes

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.outside,
    pytest.mark.filterwarnings(
        "ignore:`gradient_checkpointing:FutureWarning"
    ),  # its new name is new
]

V, B, T, H, D = 53, 3, 11, 4, 6
SIZES = dict(hidden_size=H * D, intermediate_size=29, num_hidden_layers=2, vocab_size=V)


def llama(key_heads=2, kind="Llama", **options):
    ch.hf.register()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **SIZES, num_attention_heads=H, num_key_value_heads=key_heads,
        attn_implementation="clearhead", **options,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                x.mul_(20)  # weights that are far from uniform
    return model.train()


def batch(number):
    ids = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(number))
    real = torch.ones_like(ids)
    real[1, : 2 + number % 3] = 0
    return {"input_ids": ids, "attention_mask": real, "labels": ids.where(real.bool(), -100)}


class Dense:
    """Attention as a matrix in float64, which collects what `monitor` should log."""

    def __init__(self):
        self.layers = {}

    def __call__(self, module, q, k, v, attention_mask, scaling, dropout=0.0, **others):
        k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
        scores = (q @ k.mT).double() * scaling
        allowed = torch.ones(T, T).tril().bool() & self.real[:, None, None, :].bool()
        scores = scores.masked_fill(~allowed, -math.inf)
        weights = scores.softmax(-1).nan_to_num()
        z = weights.to(v.dtype) @ v
        counts = self.real.bool()[:, None, :].expand(B, H, T)
        n = allowed.sum(-1).expand(B, H, T)
        entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1)
        first = self.real.argmax(-1)[:, None, None, None].expand(B, H, T, 1)
        numbers = {
            "max": scores.amax(-1),
            "entropy": entropy,
            "entropy_fraction": (entropy / n.log()).where(n > 1, math.nan),
            "first": weights.gather(-1, first)[..., 0],
            "self": weights.diagonal(dim1=-2, dim2=-1),
            "peaked": (weights.amax(-1) > 0.99).double(),
            "output": z.double().square().sum(-1),
        }
        of_layer = self.layers.setdefault(module.layer_idx, {name: [] for name in numbers})
        for name, x in numbers.items():
            x = x.detach().where(counts, math.nan).transpose(0, 1).flatten(1)
            of_layer[name].append(x)
        return z.transpose(1, 2).contiguous(), None

    def row(self):
        row = {}
        for layer, numbers in self.layers.items():
            joined = {name: torch.cat(x, 1) for name, x in numbers.items()}
            of = {name: x.nanmean(1) for name, x in joined.items()}
            of["max"] = joined["max"].nan_to_num(-math.inf).amax(1)
            of["output"] = (of["output"] / of["output"].mean()).sqrt()
            for name, x in of.items():
                row |= {f"attention/L{layer}/H{h}/{name}": float(x[h]) for h in range(H)}
        return row


def dense_row(model, batches, autocast):
    """Return the numbers of a step, from the same model on dense attention, with its gradients."""
    dense = Dense()
    transformers.AttentionInterface.register("dense", dense)
    model.set_attn_implementation("dense")
    for inputs in batches:
        dense.real = inputs["attention_mask"]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
            model(**inputs)
    model.set_attn_implementation("clearhead")
    return dense.row()


def gradient_row(model):
    row = {}
    for i, layer in enumerate(model.model.layers):
        for name in "qk":
            weight = getattr(layer.self_attn, f"{name}_proj").weight.grad
            norms = weight.unflatten(0, (-1, D)).double().square().sum((1, 2)).sqrt()
            for h, x in enumerate(norms.repeat_interleave(H // len(norms))):
                row[f"attention/L{i}/H{h}/grad_{name}"] = float(x)
    return row


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpoint", [None, False, True])
def test_a_step_is_that_of_dense_attention(checkpoint, autocast):
    model, batches = llama(), [batch(1), batch(2)]
    if checkpoint is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint})
        model.enable_input_require_grads()
    optimizer, logged = torch.optim.SGD(model.parameters(), lr=0.0), []
    with ch.monitor(model, every=2, log=lambda row, step: logged.append((step, row))) as monitor:
        for _ in range(3):
            for inputs in batches:
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = model(**inputs).loss
                loss.backward()
                model.train(not checkpoint)  # reentrant ones warn of evaluation in training mode
                with torch.no_grad():
                    model(**batch(7))
                model.train()
            optimizer.step()
            row = monitor.step()
            gradients = gradient_row(model)
            optimizer.zero_grad()
    assert [step for step, _ in logged] == [0, 2] and row == logged[-1][1]
    model.gradient_checkpointing_disable()
    expected = dense_row(model, batches, autocast) | gradients
    assert row.keys() == expected.keys()
    tolerance = 2e-2 if autocast else 2e-5
    for name, value in expected.items():
        if not (autocast and name.endswith("peaked")):  # a threshold
            assert row[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


def test_nothing_is_hooked_between_logged_steps():
    model = llama()
    with ch.monitor(model, every=3) as monitor:
        assert any(x._forward_hooks for x in model.modules())
        model(**batch(0)).loss.backward()
        monitor.step()
        assert not any(x._forward_hooks for x in model.modules())
        assert monitor.step() is None
    assert not any(x._forward_hooks for x in model.modules())


def test_a_model_in_evaluation_mode_is_named():
    model = llama().eval()
    with ch.monitor(model, every=1) as monitor:
        model(**batch(0)).loss.backward()
        with pytest.raises(ch.BadValue), warnings.catch_warnings():
            warnings.simplefilter("error")
            monitor.step()


def test_a_compiled_model_runs_eagerly_on_logged_steps():
    model = llama()
    expected = dense_row(model, [batch(3)], False)
    compiled = torch.compile(model, backend="eager")
    with ch.monitor(compiled, every=2) as monitor:
        for number in range(3):
            compiled(**batch(3)).loss.backward()
            row = monitor.step()
            assert (row is not None) == (number % 2 == 0)
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def wrapped(kind):
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(llama())
    from torch.distributed.fsdp import fully_shard

    model = llama()
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def of_rank(rank, kind):
    model = wrapped(kind)
    with ch.monitor(model, every=1) as monitor:
        model(**batch(rank)).loss.backward()
        row = monitor.step()
        limit = 0.7 * max(max(x) for x in monitor.largest.values())
        clipped = ch.qk_clip(model, limit=limit)
        model(**batch(rank)).loss.backward()
        return row, clipped, monitor.step()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_step_of_two_ranks_is_that_of_both_batches(kind, tmp_path):
    model = llama()
    with ch.monitor(model, every=1) as monitor:
        for number in range(2):
            (model(**batch(number)).loss / 2).backward()
        expected = monitor.step()
        limit = 0.7 * max(max(x) for x in monitor.largest.values())
        clipped = ch.qk_clip(model, limit=limit)
        for number in range(2):
            model(**batch(number)).loss.backward()
        after = monitor.step()
    for row, of_ranks, row_after in on_processes(2, of_rank, tmp_path / "ranks", kind):
        assert [x[:2] for x in of_ranks] == [x[:2] for x in clipped] and clipped
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)
        for name, value in after.items():
            if "grad" not in name:
                assert row_after[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


OF_ATTENTION = ("max", "entropy", "entropy_fraction", "first", "self", "peaked", "output")


def steps_of_rank(rank):
    """Return the row of a step of two micro-batches, of every way to train."""
    rows = {}
    for kind in ("ddp", "fsdp2"):
        for checkpoint in (None, False, True):
            for autocast in (False, True):
                model = wrapped(kind)
                if checkpoint is not None:
                    of = model.module if kind == "ddp" else model
                    of.gradient_checkpointing_enable({"use_reentrant": checkpoint})
                    of.enable_input_require_grads()
                with ch.monitor(model, every=1, stats=OF_ATTENTION) as monitor:
                    for number in (2 * rank, 2 * rank + 1):
                        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                            loss = model(**batch(number)).loss
                        loss.backward()
                    rows[kind, checkpoint, autocast] = monitor.step()
    return rows


@pytest.mark.slow
def test_two_ranks_with_micro_batches_checkpoints_and_autocast(tmp_path):
    batches = [batch(number) for number in range(4)]
    dense = {autocast: dense_row(llama(), batches, autocast) for autocast in (False, True)}
    for rows in on_processes(2, steps_of_rank, tmp_path / "ranks"):
        assert len(rows) == 12
        for (kind, checkpoint, autocast), row in rows.items():
            assert row.keys() == dense[autocast].keys()
            tolerance = 2e-2 if autocast else 2e-5
            for name, value in dense[autocast].items():
                if not (autocast and name.endswith("peaked")):  # a threshold
                    close = pytest.approx(value, rel=tolerance, abs=tolerance)
                    assert row[name] == close, (kind, checkpoint, autocast, name)


def loss_of(logits):
    return logits.square().sum()


def one_text():
    return torch.randint(0, V, (1, 23), generator=torch.Generator().manual_seed(5))


def sharded_step_of_rank(rank):
    model, ids = llama(), one_text()
    with sharded(ids.shape[1], layout="head-tail") as ring:
        with ch.monitor(model, every=1, group=dist.group.WORLD) as monitor:
            positions = ring.positions[None]
            part = dict(input_ids=ring.shard(ids), position_ids=positions, use_cache=False)
            loss_of(model(**part).logits).backward()
            for x in model.parameters():
                dist.all_reduce(x.grad)
            return monitor.step()


@pytest.mark.slow
def test_a_text_that_is_cut_over_ranks_counts_once(tmp_path):
    model = llama()
    with ch.monitor(model, every=1) as monitor:
        loss_of(model(input_ids=one_text(), use_cache=False).logits).backward()
        expected = monitor.step()
    for row in on_processes(2, sharded_step_of_rank, tmp_path / "ranks"):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-6)


class Branches(nn.Module):
    """Its second layer runs if it is asked for."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(ch.nn.SelfAttention(D, D) for _ in range(2))

    def forward(self, x, both):
        return self.layers[1](self.layers[0](x)) if both else self.layers[0](x)


def of_rank_with_another_layer(rank, first):
    model, said = nn.parallel.DistributedDataParallel(Branches().train()), []
    with ch.monitor(model, every=1, stats=["max"]) as monitor:
        for step in range(2):
            model(torch.randn(B, T, D), both=rank == 1 and step >= first).sum()
            try:
                monitor.step()
            except ch.BadValue as error:
                said.append(f"{step}: {error}")
                break
    return said


@pytest.mark.parametrize("first", [0, 1])
def test_a_layer_of_one_rank_is_refused_on_every_rank(first, tmp_path):
    for said in on_processes(2, of_rank_with_another_layer, tmp_path / "ranks", first):
        assert len(said) == 1 and said[0].startswith(f"{first}: At step {first}, a layer ran")


@pytest.mark.parametrize("key_heads", [H, 2])
def test_a_clipped_head_has_the_limit_as_its_largest_logit(key_heads):
    model = llama(key_heads)
    with ch.monitor(model, every=1, stats=["max"]) as monitor:
        model(**batch(0)).loss.backward()
        before = monitor.step()
        limit = sorted(before.values())[-3] * 0.9
        expected = {name: min(value, limit) for name, value in before.items()}
        clipped = ch.qk_clip(model, limit=limit)
        assert [x.factor for x in clipped] == [limit / x.largest for x in clipped]
        model(**batch(0)).loss.backward()
        after = monitor.step()
    first = [name for name in expected if "/L0/" in name]  # later layers read other inputs
    assert len(clipped) == sum(x > limit for x in before.values()) >= 3
    assert {n: after[n] for n in first} == pytest.approx({n: expected[n] for n in first}, rel=1e-4)
    with pytest.raises(ch.BadValue, match="each step is clipped once"):
        ch.qk_clip(model, limit=limit)
        ch.qk_clip(model, limit=limit)


def test_a_model_is_freed_after_its_training():
    model = llama()
    with ch.monitor(model, every=1, stats=["max"]) as monitor:
        model(**batch(0)).loss.backward()
        monitor.step()
    alive = weakref.ref(model)
    del model, monitor
    gc.collect()
    assert alive() is None


def test_a_module_that_is_several_layers_is_scaled_once():
    ch.hf.register()
    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=V, embedding_size=7, hidden_size=H * D, intermediate_size=29,
        num_hidden_layers=3, num_attention_heads=H, attn_implementation="clearhead",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.AlbertModel(config).train()
    ids = batch(0)["input_ids"]
    with ch.monitor(model, every=1, stats=["max"]) as monitor:
        model(ids).last_hidden_state.sum().backward()
        monitor.step()
        before = monitor.largest
        limit = 0.5 * max(before[0])
        clipped = ch.qk_clip(model, limit=limit)
        model(ids).last_hidden_state.sum().backward()
        monitor.step()
    factors = [min([x.factor for x in clipped if x.head == h], default=1.0) for h in range(H)]
    assert len({(x.module, x.head) for x in clipped}) < len(clipped)
    expected = [x * factor for x, factor in zip(before[0], factors, strict=True)]
    assert monitor.largest[0] == pytest.approx(expected, rel=1e-4)


def test_latent_attention_is_clipped_by_its_rules():
    ch.hf.register()
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        **SIZES, num_attention_heads=H, num_key_value_heads=H, q_lora_rank=7, kv_lora_rank=5,
        qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=3, first_k_dense_replace=2,
        attn_implementation="clearhead",
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config).train()
    shared = model.model.layers[0].self_attn.kv_a_proj_with_mqa.weight.clone()
    with ch.monitor(model, every=1, stats=["max"]) as monitor:
        model(**batch(0)).loss.backward()
        monitor.step()
        limit = sorted(monitor.largest[0])[1] * 0.9
        expected = [min(x, limit) for x in monitor.largest[0]]
        ch.qk_clip(model, limit=limit)
        model(**batch(0)).loss.backward()
        monitor.step()
        assert monitor.largest[0] == pytest.approx(expected, rel=1e-4)
    assert torch.equal(shared, model.model.layers[0].self_attn.kv_a_proj_with_mqa.weight)


def test_heads_whose_logits_do_not_follow_their_weights_are_refused():
    for model in llama(kind="Qwen3", head_dim=D), llama(kind="Gemma2", head_dim=D):
        weights = {name: x.clone() for name, x in model.state_dict().items()}
        with ch.monitor(model, every=1, stats=["max"]) as monitor:
            model(**batch(0)).loss.backward()
            monitor.step()
            with pytest.raises(ch.BadValue, match="cannot be clipped: its"):
                ch.qk_clip(model, limit=1e-6)
        assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())


def test_gradients_are_required_before_they_are_zero():
    model = llama()
    with ch.monitor(model, every=1) as monitor:
        model(**batch(0)).loss.backward()
        model.zero_grad()
        with pytest.raises(ch.BadValue, match="before zero_grad"):
            monitor.step()


def test_a_layer_without_known_projections_has_no_gradients():
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj = nn.Sequential(layer.self_attn.q_proj)
    with ch.monitor(model, every=1) as monitor:
        model(**batch(0)).loss.backward()
        row = monitor.step()
    assert "attention/L1/H3/max" in row and not [name for name in row if "grad" in name]


def test_lora():
    """Its adapters count in the statistics; its matrices are no plain ones to clip."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(llama(), config).train()
    with ch.monitor(model, every=1) as monitor:
        model(**batch(0)).loss.backward()
        row = monitor.step()
        with pytest.raises(ch.BadValue, match="W_Q and W_K are not found, or are not plain"):
            ch.qk_clip(model, limit=0.1)
    assert row == pytest.approx(
        dense_row(model.base_model.model, [batch(0)], False), rel=2e-5, abs=2e-5
    )


def test_every_kind_of_projection_has_its_rows():
    x = torch.randn(B, T, H * D)
    layer = ch.nn.MultiHeadAttention(H * D, heads=H, kv_heads=2)
    with ch.monitor(layer, every=1, stats=["max", "grad_q", "grad_k"]) as monitor:
        layer(x).square().sum().backward()
        row = monitor.step()
    norms = layer.W_query.weight.grad.unflatten(0, (H, D)).square().sum((1, 2)).sqrt()
    assert [row[f"attention/L0/H{h}/grad_q"] for h in range(H)] == pytest.approx(norms.tolist())
    assert monitor.layers[0].obstacle == ""
    for kind, options in ("GPT2", {}), ("GPTNeoX", {}), ("Phi3", {"pad_token_id": 0}):
        model = llama(H, kind, **options)
        with ch.monitor(model, every=1, stats=["max"]) as monitor:
            model(**batch(0)).loss.backward()
            monitor.step()
        assert monitor.layers[1].obstacle == "", kind


def test_alarms():
    from clearhead.models.monitor.alarms import Alarms

    def numbers(**of):
        quiet = {"max": [3.0, 4.0], "output": [1.0, 1.0]}
        return {5: quiet | {"entropy_fraction": [0.8, 0.9], "first": [0.1, 0.3]} | of}

    alarms = Alarms()
    for step in range(4):
        assert not alarms.check(step, numbers())
    (logit,) = alarms.check(4, numbers(max=[3.0, 21.0]))
    assert (logit.rule, logit.layer, logit.head, logit.value) == ("logit", 5, 1, 21.0)
    assert "L5H1" in logit.sentence
    assert not alarms.check(5, numbers(max=[3.0, 22.0]))  # it lasts
    assert not alarms.check(6, numbers())
    for step in range(50, 53):  # a NaN is reported once, and is in no median
        raised = alarms.check(step, numbers(max=[math.nan, 4.0]))
        assert [(x.rule, x.head, x.value) for x in raised] == [("nan", None, 1)] * (step == 50)
    raised = alarms.check(7, numbers(
        max=[101.0, 4.0], output=[1.4, 1e-4], entropy_fraction=[0.05, 0.1], first=[0.95, 0.93],
    ))  # fmt: skip
    assert [(x.rule, x.head) for x in raised] == [
        ("logit", 0), ("dead", 1), ("entropy", None), ("sink", None),
    ]  # fmt: skip


def explosion(steps, limit=None):
    """Train with a learning rate of W_Q and W_K that is ten times too high from step 20 on."""
    model, alarms, losses, largest = llama(H), [], [], []
    parts = ([], [])
    for name, x in model.named_parameters():
        parts["q_proj" in name or "k_proj" in name].append(x)
        if parts[1] and x is parts[1][-1]:
            x.data /= 5
    optimizer = torch.optim.Adam([{"params": x} for x in parts], lr=1e-2)

    def on_alarm(alarm):
        alarms.append(alarm)
        return True

    with ch.monitor(model, every=1, stats=["max"], on_alarm=on_alarm) as monitor:
        for step in range(steps):
            assert monitor.stopped == bool(alarms)
            optimizer.param_groups[1]["lr"] = 1e-2 if step < 20 else 1e-1
            loss = model(**batch(step)).loss
            loss.backward()
            optimizer.step()
            monitor.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            largest.append(max(max(x) for x in monitor.largest.values()))
            if limit is not None:
                ch.qk_clip(model, limit=limit)
    return alarms, losses, largest


def test_the_alarm_of_an_explosion_comes_before_the_loss_moves_and_a_clip_holds_it():
    (alarm, *_), losses, largest = explosion(60)
    assert alarm.rule == "logit" and 20 < alarm.step < 40
    assert largest[-1] > 5 * largest[alarm.step] > 25 * largest[19]
    loss = sum(losses[:20]) / 20
    assert all(abs(x - loss) < 0.1 * loss for x in losses[: alarm.step + 10])
    limit = 15.0
    _, _, clipped = explosion(60, limit)
    assert clipped[:20] == largest[:20]
    # A step after a clip may exceed the limit again, and is clipped then.
    assert limit < max(clipped) < 2.5 * limit < largest[-1] / 2


def test_the_callback_of_trainer(tmp_path):
    model, logged = llama(), []
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=5, per_device_train_batch_size=1, use_cpu=True,
        gradient_accumulation_steps=2, report_to=[], save_strategy="no", logging_steps=100,
        disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": x, "labels": x} for x in batch(0)["input_ids"]]
    callback = ch.monitor.TrainerCallback(every=2, log=lambda row, step: logged.append((step, row)))
    transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    assert [step for step, _ in logged] == [0, 2, 4]
    assert all(math.isfinite(x) and x > 0 for n, x in logged[-1][1].items() if "grad" in n)
    assert not any(x._forward_hooks for x in model.modules())


@pytest.mark.filterwarnings("ignore:::lightning", "ignore:.*LeafSpec")
def test_the_callback_of_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = llama()

        def training_step(self, inputs, number):
            return self.model(**inputs).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    logged = []
    callback = ch.monitor.LightningCallback(
        every=2, log=lambda row, step: logged.append((step, row))
    )
    trainer = lightning.Trainer(
        max_steps=5, accumulate_grad_batches=2, callbacks=[callback], accelerator="cpu",
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    data = torch.utils.data.DataLoader([batch(i) for i in range(10)], batch_size=None)
    trainer.fit(Module(), data)
    assert [step for step, _ in logged] == [0, 2, 4]
    assert all(math.isfinite(x) and x > 0 for n, x in logged[-1][1].items() if "grad" in n)


def records(path):
    """Yield the records of a log of LevelDB, in blocks of 32 KiB, after a header of 7 bytes."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if kind:
            record += data[at + 7 : at + 7 + size]
            at += 7 + size
        if not kind or 32768 - at % 32768 < 7:  # the rest of the block is empty
            at += -at % 32768
        if kind in (1, 4):  # all of a record, or its last part
            yield record
            record = b""


def test_wandb(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="heads") as run:
        train(llama(), tmp_path / "run", range(2), log=run.log)
    wandb.teardown()  # another process writes the file
    (path,) = tmp_path.rglob("*.wandb")
    logged = {}
    for record in map(Record.FromString, records(path)):
        items = {"/".join(x.nested_key) or x.key: x.value_json for x in record.history.item}
        if items:
            logged[int(items["_step"])] = items
    history = ch.monitor.read(tmp_path / "run")
    assert [*logged] == history.steps == [0, 1]
    for i, step in enumerate(history.steps):
        for (layer, head), value in zip(history.heads, history.values["max"][i], strict=True):
            assert float(logged[step][f"attention/L{layer}/H{head}/max"]) == value


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        ch.monitor.tensorboard(writer)({"attention/L0/H0/max": 2.5}, 50)
    read = EventAccumulator(str(tmp_path)).Reload()
    (event,) = read.Scalars("attention/L0/H0/max")
    assert (event.step, event.value) == (50, 2.5)


def train(model, folder, steps, *, every=1, log=None):
    """Return the rows that a run logged to a folder, by step, and to `log`."""
    optimizer, rows = torch.optim.SGD(model.parameters(), lr=0.01), {}
    logs = [ch.monitor.parquet(folder), lambda row, step: rows.update({step: row})]
    logs += [log] * (log is not None)

    def log_all(row, step):
        for each in logs:
            each(row, step)

    with ch.monitor(model, every=every, log=log_all, start=steps[0]) as monitor:
        for step in steps:
            model(**batch(step)).loss.backward()
            optimizer.step()
            monitor.step()
            optimizer.zero_grad()
    return rows


def test_files_have_what_was_logged(tmp_path):
    folder = tmp_path / "a*b [1]"  # characters of a pattern
    rows = train(llama(), folder, range(5), every=2)
    history = ch.monitor.read(folder)
    assert history.steps == [0, 2, 4] and len(history.heads) == 2 * H
    for i, row in enumerate(rows.values()):
        for at, (layer, head) in enumerate(history.heads):
            for name, x in history.values.items():
                assert x[i, at] == row[f"attention/L{layer}/H{head}/{name}"]
    assert "max" in repr(history) and "3 logged steps, 0 to 4, of 8 heads" in repr(history)


def test_a_resumed_run_goes_on_in_its_folder(tmp_path):
    train(llama(), tmp_path, range(6))
    (tmp_path / ".step-000000006.parquet.17-abc").write_bytes(b"PAR1")  # of a killed process
    rows = train(llama(), tmp_path, range(4, 5))
    history = ch.monitor.read(tmp_path)
    assert history.steps == [0, 1, 2, 3, 4]
    assert history.values["max"][4, 0] == rows[4]["attention/L0/H0/max"]
    with pytest.raises(ch.BadValue, match="steps 0 to 4 of a run"):
        train(llama(), tmp_path, range(2))
    assert ch.monitor.read(tmp_path).steps == [0, 1, 2, 3, 4]


WRITE_FOR_EVER = """
import itertools, sys
import clearhead as ch
write = ch.monitor.parquet(sys.argv[1])
for step in itertools.count():
    write({f"attention/L{i}/H{h}/max": float(step) for i in range(8) for h in range(8)}, step)
    print(step, flush=True)
"""


def test_a_killed_run_loses_at_most_one_step(tmp_path):
    command = [sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout:
            if int(line) == 30:
                run.kill()
                break
        last = max(map(int, run.stdout.read().split()), default=30)  # printed before the kill
    steps = ch.monitor.read(tmp_path / "run").steps
    assert list(steps) in (list(range(last + 1)), list(range(last + 2)))


def test_a_run_with_other_heads_is_refused(tmp_path):
    ch.monitor.parquet(tmp_path)({f"attention/L0/H{h}/max": 1.0 for h in range(3)}, 0)
    write = ch.monitor.parquet(tmp_path)
    with pytest.raises(ch.BadValue, match="3 heads of layer 0, and this run has 2"):
        write({f"attention/L0/H{h}/max": 1.0 for h in range(2)}, 50)
    assert ch.monitor.read(tmp_path).steps == [0]


def test_a_file_that_cannot_be_read_does_not_end_a_resumed_run(tmp_path):
    (tmp_path / "step-000000000.parquet").write_bytes(b"")
    ch.monitor.parquet(tmp_path)({"attention/L0/H0/max": 1.0}, 50)
    assert len([*tmp_path.iterdir()]) == 2


def test_a_second_run_in_a_folder_is_reported(tmp_path):
    one, two = ch.monitor.parquet(tmp_path), ch.monitor.parquet(tmp_path)
    one({"attention/L0/H0/max": 1.0}, 0)
    two({"attention/L0/H0/max": 2.0}, 1)
    with pytest.warns(UserWarning, match="step 1 is not in .*: another run wrote it"):
        one({"attention/L0/H0/max": 3.0}, 1)
    assert ch.monitor.read(tmp_path).values["max"].tolist() == [[1.0], [2.0]]
    assert len([*tmp_path.iterdir()]) == 2


def test_nan_is_not_a_missing_number(tmp_path):
    write = ch.monitor.parquet(tmp_path)
    write({}, 0)
    write({"attention/L0/H0/antecedent": 0.25}, 1)  # without the numbers of monitor
    for step, largest in (2, 3.0), (3, math.nan):
        write({"attention/L0/H0/max": largest, "attention/L1/H0/entropy": 1.0}, step)
    history = ch.monitor.read(tmp_path)
    assert history.steps == [1, 2, 3] and math.isnan(history.values["max"][0, 0])
    assert history.logged["max"].tolist() == [[False, False], [True, False], [True, False]]
    assert [(x.step, x.rule, x.layer, x.head) for x in history.alarms()] == [(3, "nan", 0, None)]
    assert "Some steps lack 1 of 2 heads; L1H0 is in 2 of 3." in repr(history)


def test_the_name_of_a_number_is_that_of_a_column(tmp_path):
    for name in ("attention/L0/H0/previous word", "attention/L0/H0/layer", "loss"):
        with pytest.raises(ch.BadValue, match=f"called '{name}'"):
            ch.monitor.parquet(tmp_path)({name: 1.0}, 0)


def test_a_step_that_cannot_be_written_does_not_end_the_run(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(28, "No space left on device")

    write = ch.monitor.parquet(tmp_path)
    write({"attention/L0/H0/max": 1.0}, 0)
    monkeypatch.setattr("os.replace", full)
    with pytest.warns(UserWarning, match="step 1 is not in .*No space"):
        write({"attention/L0/H0/max": 2.0}, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000.parquet"]


def test_a_history_repeats_the_alarms_and_is_drawn(tmp_path):
    plot = ch.views.plot
    write = ch.monitor.parquet(tmp_path)
    for step, largest in enumerate([3.0, 3.0, 3.0, 31.0, 250.0]):
        heads = {"attention/L0/H0/max": 2.0, "attention/L0/H1/max": largest}
        write(heads | {"attention/L1/H0/entropy": 0.5}, 10 * step)
    history = ch.monitor.read(tmp_path)
    (alarm,) = history.alarms()
    assert (alarm.step, alarm.layer, alarm.head, alarm.value) == (30, 0, 1, 31.0)
    assert math.isnan(history.values["entropy"][0, 0])
    if plot.can_draw():
        lines, cells, *_ = plot.training(history, "max").axes
        assert lines.get_legend().get_texts()[0].get_text() == "L0H1"
        drawn = cells.collections[0].get_array().reshape(3, 5)
        assert drawn[1].tolist() == [3.0, 3.0, 3.0, 31.0, 250.0]
        with pytest.raises(ch.BadValue, match="did you mean 'max'"):
            plot.training(history, "maxx")


def test_a_folder_without_steps(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ch.BadValue, match="no steps of a training"):
            ch.monitor.read(folder)


def test_wrong_arguments():
    model = llama()
    with pytest.raises(ch.BadValue, match="max_logit"):
        ch.monitor(model, stats=["max_logit"])
    with pytest.raises(ch.BadType, match="stats"):
        ch.monitor(model, stats="max")
    with pytest.raises(ch.BadValue, match="every"):
        ch.monitor(model, every=0)
    with pytest.raises(ch.BadValue, match="largest logits"):
        ch.qk_clip(llama())
    with pytest.raises(ch.BadValue, match="limit"):
        ch.qk_clip(model, limit=-1)
