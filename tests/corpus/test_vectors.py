"""The vectors of a head at examples are those of plain hooks in transformers' eager attention."""

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import clearhead as ch
from clearhead.corpus.vectors import principal_components

from .models import CONTEXT, MODELS, SIZES, H, texts, tokenizer

LAYER, HEAD = 1, 4
PROJECTIONS = {  # names of the modules whose outputs are queries, keys and values, and of W_O
    "gpt2": ("h.1.attn.c_attn", "h.1.attn.c_proj"),
    "llama": (*(f"layers.1.self_attn.{x}_proj" for x in "qkv"), "layers.1.self_attn.o_proj"),
    "bert": (
        *(f"encoder.layer.1.attention.self.{x}" for x in ("query", "key", "value")),
        "encoder.layer.1.attention.output.dense",
    ),
    "t5": (*(f"encoder.block.1.layer.0.SelfAttention.{x}" for x in "qkvo"),),
}


def hooked(name: str, model: torch.nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return q and k before and after rotation, v and z of a context, (heads, T, D) each."""
    *inputs, output = PROJECTIONS[name]
    results: dict[str, torch.Tensor] = {}
    hooks = [
        model.get_submodule(module).register_forward_hook(
            lambda _, __, result, module=module: results.update({module: result[0]})
        )
        for module in inputs
    ]
    hooks.append(
        model.get_submodule(output).register_forward_pre_hook(
            lambda _, args: results.update({output: args[0][0]})
        )
    )
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    joined = [results[module] for module in inputs]
    q, k, v = joined if len(joined) == 3 else joined[0].chunk(3, -1)
    by_head = {
        part: x.unflatten(-1, (-1, 8)).transpose(0, 1)
        for part, x in (("q", q), ("k", k), ("v", v), ("o", results[output]))
    }
    if name == "llama":
        cos, sin = model.rotary_emb(q, torch.arange(len(q))[None])
        plain = by_head["q"], by_head["k"]
        turned = apply_rotary_pos_emb(*(x[None] for x in plain), cos, sin)
        by_head |= {"q": turned[0][0], "k": turned[1][0]}
        by_head |= {"q_unrotated": plain[0], "k_unrotated": plain[1]}
    return by_head


@pytest.fixture(scope="module", params=sorted(MODELS))
def surveyed(request, tmp_path_factory):
    torch.manual_seed(3)
    model = MODELS[request.param](attn_implementation="clearhead").eval()
    eager = MODELS[request.param](attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    tok = tokenizer(True)
    out = tmp_path_factory.mktemp("survey")
    survey = ch.survey(model, texts(9), out=out, tokenizer=tok, context=CONTEXT)
    vectors = survey.vectors(model, LAYER, HEAD, n=40, tokenizer=tok)
    return request.param, survey, model, eager, vectors


def test_vectors_are_those_of_plain_hooks(surveyed):
    name, survey, _, eager, vectors = surveyed
    wanted = {"q", "k", "v", "o"} | ({"q_unrotated", "k_unrotated"} if name == "llama" else set())
    assert set(vectors.parts) == wanted
    assert vectors.key_head == (HEAD // 3 if name == "llama" else HEAD)
    words, known = tokenizer(True).get_vocab(), {}
    rows = vectors.examples.to_pylist()
    assert len({(x["text"], x["context"], x["query"]) for x in rows}) == len(rows) >= 40
    for i, row in enumerate(rows):
        place = row["text"], row["context"]
        tokens = survey.context(*place)
        if place not in known:
            ids = torch.tensor([[words[token] for token in tokens]])
            known[place] = hooked(name, eager, ids)
        assert row["query_token"] == tokens[row["query"]]
        assert row["key_token"] == tokens[row["key"]]
        for part, x in vectors.parts.items():
            head = HEAD if part[0] in "qo" else vectors.key_head
            position = row["query"] if part[0] in "qo" else row["key"]
            exact = known[place][part][head, position]
            torch.testing.assert_close(x[i], exact, rtol=1e-4, atol=2e-5)
        with torch.no_grad():
            weight = eager(
                input_ids=torch.tensor([[words[token] for token in tokens]]), output_attentions=True
            ).attentions[LAYER][0, HEAD, row["query"]]
        # T5 does not scale its scores, so a weight has the rounding of q and k several times.
        assert row["weight"] == pytest.approx(float(weight.max()), abs=5e-5)
        assert float(weight[row["key"]]) == pytest.approx(float(weight.max()), abs=1e-5)


def test_components_are_those_of_numpy(surveyed):
    _, _, _, _, vectors = surveyed
    for part, x in vectors.parts.items():
        shown = vectors.pca(part)
        centred = x.numpy().astype(np.float64)
        centred = centred - centred.mean(0)
        _, s, rows = np.linalg.svd(centred, full_matrices=False)
        for c in range(3):
            largest = np.abs(rows[c]).argmax()
            direction = rows[c] * np.sign(rows[c][largest])
            points = shown.points[:, c].numpy()
            np.testing.assert_allclose(points, centred @ direction, atol=1e-10 * s[0])
            assert float(shown.shares[c]) == pytest.approx(s[c] ** 2 / (s**2).sum())


def test_examples_that_rest_on_the_first_key_are_left_out(surveyed):
    _, _, _, _, vectors = surveyed
    others = vectors.without_first()
    at = [i for i, row in enumerate(vectors.examples.rows) if row[3]]
    assert 0 < len(at) < len(vectors.examples.rows)
    assert others.examples.rows == tuple(vectors.examples.rows[i] for i in at)
    assert others.parts["k"].equal(vectors.parts["k"][at])


def test_a_survey_is_read_only_up_to_the_layer_and_the_model_still_works(surveyed):
    name, survey, model, _, vectors = surveyed
    layers = []
    hooks = [
        module.register_forward_hook(lambda module, *_: layers.append(module))
        for module in model.modules()
    ]
    seen = []
    again = survey.vectors(
        model, 0, HEAD, n=1, tokenizer=tokenizer(True), on_context=lambda *at: seen.append(at)
    )
    for hook in hooks:
        hook.remove()
    assert seen == [(0, 1), (1, 1)] and len(again.parts["q"]) >= 1
    assert layers.count(model) == (name == "llama")  # on a few ids, which show the rotation
    first = survey.vectors(model, LAYER, HEAD, n=40, tokenizer=tokenizer(True))
    for part, x in vectors.parts.items():
        assert first.parts[part].equal(x)
    with pytest.raises(ch.BadValue, match="of is 'z'"):
        again.pca("z")
    with pytest.raises(ch.BadValue, match="Layer 7, head 0"):
        survey.vectors(model, 7, 0, tokenizer=tokenizer(True))


def test_a_rotation_that_depends_on_the_length_is_not_undone(tmp_path):
    import transformers

    torch.manual_seed(3)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = transformers.LlamaConfig(num_key_value_heads=2, rope_parameters=rope, **SIZES)
    config._attn_implementation = "clearhead"
    model = transformers.LlamaModel(config).eval()
    tok = tokenizer(True)
    survey = ch.survey(model, texts(3), out=tmp_path, tokenizer=tok, context=CONTEXT)
    vectors = survey.vectors(model, 0, H - 1, tokenizer=tok)
    assert set(vectors.parts) == {"q", "k", "v", "o"}
    assert "is 'dynamic'" in vectors.why_rotated
    with pytest.raises(ch.BadValue, match=r"this head has q, k, v, o\. The rotation"):
        vectors.pca("q_unrotated")


def test_components_of_equal_vectors_and_of_rank_one():
    x = torch.randn(7, 5)
    assert principal_components(x[:1].repeat(9, 1)).points.shape == (9, 0)
    rounded = x[:1] * (1 + 1e-7 * torch.randn(9, 5))
    assert rounded.unique(dim=0).shape[0] > 1
    assert principal_components(rounded).points.shape == (9, 0)
    many = torch.randn(300, 5)
    assert principal_components(many.bfloat16()).shares.tolist() == pytest.approx(
        principal_components(many).shares.tolist(), rel=0.01
    )
    assert principal_components(x[:1]).shares.tolist() == []
    assert principal_components(x[:0]).points.shape == (0, 0)
    line = torch.arange(6.0)[:, None] * torch.tensor([3.0, -4.0, 0.0]) + 5
    shown = principal_components(line)
    assert shown.shares.tolist() == pytest.approx([1.0])
    assert shown.components[0].tolist() == pytest.approx([-0.6, 0.8, 0.0])
    assert shown.points[:, 0].tolist() == pytest.approx([12.5, 7.5, 2.5, -2.5, -7.5, -12.5])


def test_components_need_finite_vectors_and_a_count():
    x = torch.randn(7, 5)
    x[3, 2] = torch.inf
    with pytest.raises(ch.BadValue, match="NaN or infinity in 1 of 7 vectors"):
        principal_components(x)
    for count in (0, -1):
        with pytest.raises(ch.BadValue, match=f"components={count}"):
            principal_components(x[:3], count)
    with pytest.raises(ch.BadType, match=r"components=1\.5"):
        principal_components(x[:3], 1.5)
