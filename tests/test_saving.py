"""Results written by `torch.save` are read by `torch.load` with its default, weights_only=True."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._pytree import tree_leaves

import clearhead as ch
from clearhead.core.errors import BadValue
from clearhead.core.formatting import Token
from clearhead.demo import load
from tests.fresh_process import run_program

STATS = ["entropy", ch.topk(2), ch.mass({"first": ch.prefix(1)}), ch.pooled(2, 3)]


def block() -> nn.Module:
    torch.manual_seed(0)
    return ch.nn.TransformerBlock(12, 3, causal=True)


def recorded(tmp_path, to=None):
    model = block()
    with ch.watch(model, stats=STATS, exact_rows=[-1], outputs=True, to=to) as seen:
        model(torch.randn(2, 7, 12))
    return seen


def looked(tmp_path):
    q, k = torch.randn(1, 2, 5, 4, requires_grad=True), torch.randn(1, 2, 7, 4)
    return ch.look(q, k, k, stats=STATS, mask=ch.Causal(align="end"))


def explained(tmp_path):
    q = torch.randn(1, 2, 5, 4)
    return ch.explain(q, q, q, mask=ch.causal, bias=ch.alibi(), tokens=list("abcde"))


def planned(tmp_path):
    q = torch.randn(1, 2, 5, 4)
    return ch.plan(q, q, q, mask=ch.causal)


def effects(tmp_path):
    model = block().eval()
    return ch.effects(model, {"x": torch.randn(1, 7, 12)}, lambda out: out.sum((1, 2)))


RESULTS = {
    "look": looked,
    "recording": recorded,
    "recording in a folder": lambda path: recorded(path, to=path / "calls"),
    "trace": explained,
    "plan": planned,
    "effects": effects,
    "report": lambda _: ch.report(load(None), "She danced in the castle.", progress=False),
}


def numbers(value: object) -> list[object]:
    """Everything that a result holds, its tensors among it."""
    if hasattr(value, "__dict__") and type(value).__module__.startswith("clearhead"):
        return [x for part in vars(value).values() for x in numbers(part)]
    leaves = tree_leaves(value)
    return [x for leaf in leaves for x in ([leaf] if leaf is value else numbers(leaf))]


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_read_back(name, tmp_path):
    result = RESULTS[name](tmp_path)
    torch.save(result, tmp_path / "saved.pt")
    read = torch.load(tmp_path / "saved.pt")
    assert type(read) is type(result)
    a, b = numbers(result), numbers(read)
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


SAVABLE = ("look", "recording", "trace", "report")


@pytest.mark.parametrize("name", SAVABLE)
def test_a_result_is_saved_without_pickle_and_loaded(name, tmp_path):
    result = RESULTS[name](tmp_path)
    path = result.save(tmp_path / "saved.safetensors")
    assert b"\x80\x04" not in path.read_bytes()[:2] and list(tmp_path.glob(".*")) == []
    read = ch.load(path)
    assert type(read) is type(result) and repr(read) == repr(result)
    a, b = numbers(result), numbers(read)
    assert len(a) == len(b) > 0
    for x, y in zip(a, b, strict=True):
        assert type(x) is type(y)
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_other_programs_read_the_tensors_by_name(tmp_path):
    look = looked(tmp_path)
    tensors = load_file(look.save(tmp_path / "look.safetensors"))
    assert torch.equal(tensors["out"], look.out)
    assert any(torch.equal(x, look.entropy) for x in tensors.values())


def test_a_loaded_report_makes_the_same_page(tmp_path):
    report = RESULTS["report"](tmp_path)
    read = ch.load(report.save(tmp_path / "report.safetensors"))
    assert ch.views.html.report_page(read) == ch.views.html.report_page(report)


def test_tokens_keep_their_spelling(tmp_path):
    tokens = [Token(" Mary", "ĠMary", 7), Token("s", "s", 3, True)]
    q = torch.randn(1, 1, 2, 4)
    read = ch.load(ch.explain(q, q, q, tokens=tokens).save(tmp_path / "trace"))
    assert [(x, x.raw, x.id, x.joined) for x in read.queries] == [
        (" Mary", "ĠMary", 7, False),
        ("s", "s", 3, True),
    ]


def test_infinity_nan_and_16_bits_are_kept(tmp_path):
    q = torch.full((1, 1, 2, 4), torch.inf, dtype=torch.bfloat16)
    trace = ch.explain(q, q, q, mask=ch.causal)
    read = ch.load(trace.save(tmp_path / "trace"))
    for a, b in zip(trace, read, strict=True):
        assert a.tensor.dtype == b.tensor.dtype and torch.equal(a.tensor.isnan(), b.tensor.isnan())
        assert torch.equal(a.tensor.nan_to_num(), b.tensor.nan_to_num())


def test_what_is_not_a_saved_result_is_refused(tmp_path):
    with pytest.raises(BadValue, match="is missing"):
        ch.load(tmp_path / "none")
    (tmp_path / "text").write_text("{}")
    with pytest.raises(BadValue, match="cannot be read"):
        ch.load(tmp_path / "text")
    save_file({"a": torch.ones(2)}, tmp_path / "tensors")
    with pytest.raises(BadValue, match="cannot be read"):
        ch.load(tmp_path / "tensors")
    for content in ('{"class": "Popen", "arguments": ["ls"], "state": null}',
                    '{"class": "Step", "arguments": [], "state": [["name", "x"]]}'):  # fmt: skip
        metadata = {"clearhead": content, "clearhead_format": "1"}
        save_file({"a": torch.ones(2)}, tmp_path / "tensors", metadata)
        with pytest.raises(BadValue, match="cannot be read"):
            ch.load(tmp_path / "tensors")
    with pytest.raises(BadValue, match="cannot be written"):
        looked(tmp_path).save(tmp_path / "no" / "folder")
    with pytest.raises(BadValue, match="files in"):
        recorded(tmp_path, to=tmp_path / "calls").save(tmp_path / "a")


def test_tables_have_the_numbers_of_the_results(tmp_path):
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 7, 4)
    look = ch.look(q, k, k, stats=STATS, mask=ch.Causal(align="end"))
    table = look.to_pandas()
    assert len(table) == 2 * 5 and list(table.columns[:3]) == ["sequence", "head", "query"]
    row = table[(table["head"] == 1) & (table["query"] == 3)].iloc[0]
    assert row["entropy"] == float(look.entropy[0, 1, 3])
    assert row["topk weight"] == float(look.topk.weights[0, 1, 3, 0])
    assert row["mass first"] == float(look.mass["first"][0, 1, 3])

    report = RESULTS["report"](tmp_path)
    heads = report.to_pandas()
    assert len(heads) == 16
    assert list(heads["entropy"]) == [head.entropy for head in report.heads]
    assert list(heads["previous"]) == [head.shares["previous"] for head in report.heads]

    trace = explained(tmp_path)
    weights = trace.to_pandas()
    assert len(weights) == 2 * 5 * 5
    cell = weights[(weights["head"] == 1) & (weights["query"] == 4) & (weights["key"] == 2)]
    assert cell["weights"].item() == float(trace["weights"][0, 1, 4, 2])
    assert (cell["query token"].item(), cell["key token"].item()) == ("e", "c")

    seen = recorded(tmp_path)
    calls = seen.to_pandas()
    assert list(calls["head"]) == [0, 1, 2]
    assert calls["entropy"][1] == pytest.approx(float(seen[0].entropy.detach()[:, 1].mean()))


def test_a_new_process_reads_them_once_clearhead_is_imported(tmp_path):
    for name in ("look", "report"):
        torch.save(RESULTS[name](tmp_path), tmp_path / f"{name}.pt")
    code = (
        "import sys, torch, clearhead; print(*(type(torch.load(x)).__name__ for x in sys.argv[1:]))"
    )
    done = run_program(code, *(tmp_path / f"{x}.pt" for x in ("look", "report")))
    assert done.stdout == "Look Report\n", done.stderr
