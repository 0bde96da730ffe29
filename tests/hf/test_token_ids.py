"""An id that a model has no embedding for is told, by whatever runs the model."""

import pytest
import torch

import clearhead as ch
from clearhead.core.errors import BadValue
from clearhead.models.report import report, tile
from clearhead.models.report.whatif import whatif
from tests.views.serve.models import save_gpt2

transformers = pytest.importorskip("transformers")
RULE = r" got the id {}\.\n  Rule: it has 97 embeddings, for the ids 0 to 96\.\n  Hint: use"


def bert():
    ch.hf.register()
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=11,
    )  # fmt: skip
    return transformers.AutoModel.from_config(config, attn_implementation="clearhead").eval()


def size(output):
    return output.last_hidden_state.square().sum()


@pytest.mark.parametrize("strange", [97, -1])
@pytest.mark.parametrize(
    "read",
    [
        report,
        lambda model, ids: report(model, {"input_ids": ids}),
        lambda model, ids: tile(model, ids, 0, 0, range(1), range(1)),
        lambda model, ids: ch.effects(model, ids, size),
    ],
)
def test_of_a_module(read, strange):
    model = bert()
    text = r"^embeddings\.word_embeddings" + RULE.format(strange)
    with pytest.raises(BadValue, match=text):
        read(model, torch.tensor([[5, strange, 96]]))
    read(model, torch.tensor([[5, 0, 96]]))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_of_a_decoder_whose_embeddings_are_scaled():
    ch.hf.register()
    config = transformers.BartConfig(
        vocab_size=97, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=11, decoder_ffn_dim=11, scale_embedding=True,
    )  # fmt: skip
    model = transformers.AutoModel.from_config(config, attn_implementation="clearhead").eval()
    given = {"input_ids": torch.tensor([[5, 6]]), "decoder_input_ids": torch.tensor([[5, 6, 97]])}
    with pytest.raises(BadValue, match=r"^decoder\.embed_tokens" + RULE.format(97)):
        report(model, given)
    report(model, {**given, "decoder_input_ids": torch.tensor([[5, 6, 96]])})


def test_of_a_checkpoint_whose_tokenizer_has_more_words(tmp_path):
    checkpoint = ch.hf.Checkpoint(save_gpt2(tmp_path, predicts=True))
    checkpoint.tokenizer.add_tokens(["news"])
    edits = [ch.edits.ablate(layers=[0])]
    for read in (report, lambda *given: whatif(*given, edits), ch.hf.Checkpoint.explain):
        with pytest.raises(BadValue, match=r"^(transformer\.)?wte" + RULE.format(97)):
            read(checkpoint, "w1 w2 news")
        read(checkpoint, "w1 w2 w3")


def test_more_tokens_than_a_model_has_positions(tmp_path):
    model = ch.hf.Checkpoint(save_gpt2(tmp_path, longest=7)).model
    with pytest.raises(BadValue, match=r"wpe got the id 7\.(.|\n)*a shorter text"):
        report(model, torch.arange(8)[None])


def test_an_encoder_decoder_without_a_text_for_its_decoder():
    ch.hf.register()
    config = transformers.T5Config(
        vocab_size=97, d_model=16, d_kv=8, d_ff=11, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    load = transformers.T5ForConditionalGeneration._from_config
    model, ids = load(config, attn_implementation="clearhead").eval(), torch.tensor([[5, 6, 7]])
    for inputs in (ids, {"input_ids": ids}):
        for read in (report, ch.effects):
            with pytest.raises(BadValue, match=r"nothing for its decoder(.|\n)*decoder_input_ids"):
                read(model, inputs)
    assert len(report(model, {"input_ids": ids, "decoder_input_ids": ids}).layers) == 3
    assert len(report(model.get_encoder(), ids).layers) == 1


def test_inputs_with_which_a_model_does_not_run():
    with pytest.raises(
        BadValue, match=r"^The BertModel raised ValueError on ids: You must specify"
    ):
        report(bert(), {"ids": torch.tensor([[5]])})
    with pytest.raises(BadValue, match=r"^The BertModel raised RuntimeError on input_ids: "):
        report(bert(), torch.ones(1, 3))
