"""The benchmark of a GPU, where there is none: it refuses, and its logic runs on a CPU by a false
clock. Nothing was yet measured on a GPU."""

import pytest
import torch
from typer.testing import CliRunner

import clearhead as ch
from clearhead import bench
from clearhead.bench import gpu
from clearhead.bench.cases import Case
from clearhead.errors import BadValue
from clearhead.problem.check import Options, make_problem
from clearhead_cli import app


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses():
    with pytest.raises(BadValue, match="no CUDA device here"):
        bench.measure_gpu(["decode"])


def test_unknown_groups_are_named():
    with pytest.raises(BadValue, match="'prefill', 'masked', 'decode', 'training', 'look'"):
        bench.measure_gpu(["tiny"])


def test_options_of_the_cpu_are_refused():
    ran = CliRunner().invoke(app, ["bench", "--gpu", "--threads", "2"])
    assert isinstance(ran.exception, BadValue) and "on the CPU" in str(ran.exception)


@pytest.fixture
def clock(monkeypatch):
    """A CPU in place of the GPU; every call takes a second, and the ceilings are known."""
    monkeypatch.setattr(gpu, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(gpu, "seconds_per_call", lambda run: (run(), 1.0)[1])
    monkeypatch.setattr(gpu, "product_ceiling", lambda dtype: 1e6)
    monkeypatch.setattr(gpu, "read_ceiling", lambda: 1e5)
    peers = {
        n: run for n, run in gpu.PEERS.items() if n in ("clearhead", "sdpa flash", "sdpa cudnn")
    }
    monkeypatch.setattr(gpu, "PEERS", peers)


@pytest.mark.parametrize("case", [
    Case("causal", H=2, G=1, Tq=7, Tk=7, D=8, mask=ch.causal),
    Case("decode", H=2, G=1, Tq=1, Tk=7, D=8),
    Case("training", H=2, G=2, Tq=7, Tk=7, D=8, training=True),
], ids=lambda case: case.name)  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch says why cuDNN declines
def test_a_case_gives_rates_shares_and_reasons(clock, monkeypatch, case):
    monkeypatch.setitem(gpu.GROUPS, "masked", [case])
    (result,) = bench.measure_gpu(["masked"], rounds=2)["results"]
    assert set(result["peers"]) == {"clearhead", "sdpa flash"}
    assert "sdpa cudnn" in result["declined"]
    work = case.work(make_problem(*case.tensors(), Options(mask=case.mask))[0])
    for peer in result["peers"].values():
        assert peer["seconds"] == 1 and peer["times ours"] == 1
        assert peer["share"] == pytest.approx(work / (1e5 if case.decode else 1e6))
    assert bench.table(result)


def test_looking_is_timed_beside_the_output_alone(clock, monkeypatch):
    monkeypatch.setitem(gpu.GROUPS, "look", [Case("look", H=2, G=1, Tq=70, Tk=70, mask=ch.causal)])
    (result,) = bench.measure_gpu(["look"], rounds=1)["results"]
    assert list(result["peers"]) == [
        "clearhead", "look lse, max, entropy", "look topk(8)", "look received, map(64, 64)",
    ]  # fmt: skip


def test_every_case_can_be_planned():
    """On meta tensors, which take no memory: the sizes fit each other and their masks."""
    for cases in gpu.GROUPS.values():
        for case in cases:
            shapes = ((case.H, case.Tq), (case.G, case.Tk), (case.G, case.Tk))
            tensors = (
                torch.empty(case.B, heads, T, case.D, dtype=case.dtype, device="meta")
                for heads, T in shapes
            )
            assert ch.plan(*tensors, mask=case.mask).pairs > 0
