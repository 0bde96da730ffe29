"""The benchmark: that it runs, asserts who answered, and says who did not."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from clearhead import bench
from clearhead.bench import cases, peers
from clearhead.cli import app
from clearhead.errors import BadValue

pytest.importorskip("clearhead._kernels", reason="what is timed is the C++ core")


def test_a_round_measures_and_tells(tmp_path):
    told = []
    found = bench.measure(["tiny"], rounds=1, peers=["clearhead", "torch sdpa"], tell=told.append)
    assert told == found["results"] and len(told) == bench.how_many(["tiny"], None)
    for result in told:
        assert result["ceiling"] > 0 and not result["declined"]
        ours, theirs = (result["peers"][name] for name in ("clearhead", "torch sdpa"))
        assert ours["times ours"] == 1 and ours["seconds"] > 0
        assert theirs["times ours"] == pytest.approx(theirs["seconds"] / ours["seconds"])
        assert ours["share"] == pytest.approx(ours["rate"] / result["ceiling"])
    assert torch.get_num_threads() == found["about"]["threads"]


def test_a_masked_question_is_timed_beside_the_whole_one(monkeypatch):
    whole = cases.Case("whole", H=1, G=1, Tq=200, Tk=200)
    narrow = replace(whole, name="narrow", mask=cases.window(before=9, after=0))
    monkeypatch.setitem(cases.GROUPS, "masked", [whole, narrow])
    first, second = bench.measure(["masked"], rounds=1, peers=["clearhead"])["results"]
    assert "of dense" not in first and "without the mask" not in bench.table(first)
    assert second["of dense"] > 0
    assert f"takes {second['of dense']:.2f} x as long as without the mask" in bench.table(second)


def test_who_cannot_answer_is_named():
    case = cases.DECODE[0]
    run, reason = peers.prepare("torch flex", case, case.tensors())
    assert run is None and "prefill" in reason


@pytest.mark.parametrize("wrong", [{"groups": ["tinny"]}, {"peers": ["numpy"]}])
def test_an_unknown_name_is_refused_and_the_known_are_listed(wrong):
    with pytest.raises(BadValue, match=r"tiny|torch sdpa"):
        bench.measure(**wrong)


def test_work_is_counted_by_the_pencil():
    case = cases.Case("pencil", B=2, H=4, G=2, Tq=3, Tk=3, D=5, mask=cases.causal)
    assert case.pairs() == 2 * 4 * 6
    assert case.flops() == 4 * 5 * case.pairs()  # two products, a multiplication and an addition
    step = cases.Case("step", B=2, H=4, G=2, Tq=1, Tk=7, D=5, dtype=torch.bfloat16)
    assert step.bytes() == 2 * (2 * 2 * 7 * 5) * 2  # keys and values, read once


def test_the_command_writes_figures_and_a_plot(tmp_path):
    out = tmp_path / "bench.json"
    asked = ["bench", "tiny", "--rounds", "1", "--peer", "clearhead", "--out", str(out)]
    ran = CliRunner().invoke(app, asked)
    assert ran.exit_code == 0, ran.output
    assert "tiny 1,1,5,4" in ran.output and "clearhead" in ran.output
    assert json.loads(out.read_text())["results"] and out.with_suffix(".png").stat().st_size > 1000
