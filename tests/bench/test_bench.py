"""The benchmark: it runs, its rates and shares are right, and it reports who was not timed."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import bench
from bench import cases, looking, peers, smollm2
from clearhead.core.errors import BadValue
from clearhead.core.problem.check import Options, make_problem
from clearhead_cli import app

pytest.importorskip("clearhead._kernels", reason="what is timed is the C++ core")


def test_a_run_measures_every_case_and_reports_each_result():
    results = []
    found = bench.measure(
        ["tiny"], rounds=1, peers=["clearhead", "torch sdpa"], on_result=results.append
    )
    assert results == found["results"] and len(results) == bench.count_results(["tiny"], None)
    for result in results:
        assert result["ceiling"] > 0 and not result["declined"]
        ours, theirs = (result["peers"][name] for name in ("clearhead", "torch sdpa"))
        assert ours["times ours"] == 1 and ours["seconds"] > 0
        assert theirs["times ours"] == pytest.approx(theirs["seconds"] / ours["seconds"])
    assert torch.get_num_threads() == found["about"]["threads"]


@pytest.mark.parametrize("training", [False, True])
def test_a_share_does_not_depend_on_how_the_machine_drifts(monkeypatch, training):
    """Every sample takes 1.3 times as long as the one before, of ceilings and peers alike."""
    case = cases.Case("drift", H=1, G=1, Tq=7, Tk=11, D=3, training=training)
    problem, _ = make_problem(*case.tensors(), Options(mask=case.mask))
    slow = 1.0

    def sample() -> float:
        nonlocal slow
        slow *= 1.3
        return slow

    monkeypatch.setitem(cases.GROUPS, "tiny", [case])
    module = sys.modules["bench.measure"]  # bench.measure is its function
    monkeypatch.setattr(module.Ceilings, "fma", lambda *_: 1e9 / sample())
    seconds = 2 * case.work(problem) / 1e9
    monkeypatch.setattr(module, "seconds_per_call", lambda run, threads: seconds * sample())
    peers = ["clearhead", "torch sdpa", "torch eager"]
    [result] = bench.measure(["tiny"], rounds=3, peers=peers)["results"]
    # Half the ceiling, seen through the mean of 1.3 and 1 / 1.3.
    shares = [result["peers"][name]["share"] for name in peers]
    assert shares == pytest.approx([0.5 / ((1.3 + 1 / 1.3) / 2)] * 3)


def test_a_masked_case_is_timed_beside_the_same_without_mask(monkeypatch):
    full = cases.Case("full", H=1, G=1, Tq=200, Tk=200)
    narrow = replace(full, name="narrow", mask=cases.window(before=9, after=0))
    monkeypatch.setitem(cases.GROUPS, "masked", [full, narrow])
    first, second = bench.measure(["masked"], rounds=1, peers=["clearhead"])["results"]
    assert "of dense" not in first and "without the mask" not in bench.table(first)
    assert second["of dense"] > 0
    assert f"takes {second['of dense']:.2f} x as long as without the mask" in bench.table(second)


def test_a_peer_that_cannot_compute_a_case_gives_the_reason():
    case = cases.DECODE[0]
    run, reason = peers.prepare("torch flex", case, case.tensors())
    assert run is None and "prefill" in reason


@pytest.mark.parametrize("format", ["q8_0", "q4_0"])
def test_ggml_decodes_what_clearhead_decodes(format):
    """It rounds the query as well, so its output differs by the rounding of 8 bits."""
    pytest.importorskip("libggml")
    case = cases.Case("decode", B=2, H=4, G=2, Tq=1, Tk=300, D=64)
    tensors = case.tensors()
    ggml, _ = peers.prepare(f"ggml {format}", case, tensors)
    own, _ = peers.prepare(f"clearhead {format}", case, tensors)
    for _ in range(2):
        torch.testing.assert_close(ggml(), own(), rtol=0, atol=0.01)
    exact, _ = peers.prepare("clearhead", case, tensors)
    assert (ggml() - exact()).abs().max() > (own() - ggml()).abs().max()


@pytest.mark.parametrize("wrong", [{"groups": ["tinny"]}, {"peers": ["numpy"]}])
def test_an_unknown_name_raises_and_lists_the_known_ones(wrong):
    with pytest.raises(BadValue, match=r"tiny|torch sdpa"):
        bench.measure(**wrong)


def test_work_counted_by_hand():
    case = cases.Case("causal", B=2, H=4, G=2, Tq=3, Tk=3, D=5, mask=cases.causal)
    problem, _ = make_problem(*case.tensors(), Options(mask=case.mask))
    pairs = 2 * 4 * 6
    assert case.work(problem) == 2 * (2 * 5) * pairs  # two products, of multiply and add
    assert replace(case, training=True).work(problem) == (2 + 5) * (2 * 5) * pairs
    step = cases.Case("step", B=2, H=4, G=2, Tq=1, Tk=7, D=5, dtype=torch.bfloat16)
    problem, _ = make_problem(*step.tensors(), Options())
    assert step.work(problem) == 2 * (2 * (2 * 2 * 7 * 5) + 2 * (2 * 4 * 5))  # k, v, q and output


def test_the_command_writes_figures_and_a_plot(tmp_path):
    out = tmp_path / "bench.json"
    arguments = ["bench", "tiny", "--rounds", "1", "--peer", "clearhead", "--out", str(out)]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    assert "tiny 1,1,5,4" in ran.output and "clearhead" in ran.output
    assert json.loads(out.read_text())["results"] and out.with_suffix(".png").stat().st_size > 1000


def test_looking_times_every_statistic_beside_attention():
    ratios = looking.ratios(tokens=5, rounds=1)
    assert list(ratios) == [looking.AGAIN, *looking.requests(5)]
    again, *others = ratios.values()
    assert 0.2 < again < 5 and min(others) > 1  # at 5 tokens they take several times as long


@pytest.mark.outside
def test_a_model_is_timed_in_forward_generation_and_training():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    cases = smollm2.of_model(model, 1, 1, forward=(7,), generation=(5,), training=(6,))
    found = {result["case"]: result for result in cases}
    assert [*found] == [
        "SmolLM2 float32, a forward of 7 tokens",
        "SmolLM2 float32, 16 tokens after 5",
        "SmolLM2 float32, a training step of 6 tokens",
    ]
    for result in found.values():
        ours, without = (result["peers"][name] for name in ("clearhead", smollm2.WITHOUT))
        assert ours["times ours"] == 1 and result["attention"] == 1 - without["times ours"]
        assert f"attention takes {result['attention']:.1%}" in bench.table(result)
    assert smollm2.CACHED in found["SmolLM2 float32, 16 tokens after 5"]["peers"]
