"""The benchmark of a GPU, where there is none: it refuses, and its logic runs on a CPU by a false
clock. Nothing was yet measured on a GPU."""

import sys
from types import SimpleNamespace

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
    monkeypatch.setattr(gpu, "BEYOND_CACHE", 1000)
    peers = {
        n: run for n, run in gpu.PEERS.items() if n in ("clearhead", "sdpa flash", "sdpa cudnn")
    }
    monkeypatch.setattr(gpu, "PEERS", peers)


CAUSAL = Case("causal", H=2, G=1, Tq=7, Tk=7, D=8, mask=ch.causal)
DECODE = Case("decode", H=2, G=1, Tq=1, Tk=7, D=8)


def measured(monkeypatch, case, rounds=2, **peers):
    """The result of one case, of these peers."""
    monkeypatch.setattr(gpu, "PEERS", {name.replace("_", " "): run for name, run in peers.items()})
    monkeypatch.setitem(gpu.GROUPS, "masked", [case])
    (result,) = bench.measure_gpu(["masked"], rounds=rounds)["results"]
    assert bench.table(result)
    return result


def fails(error, after=0):
    """A peer that fails at a call."""

    def make(case, q, k, v):
        left = iter(range(after))

        def run():
            if next(left, None) is None:
                raise error
            return q

        return run

    return make


@pytest.mark.parametrize("case", [
    CAUSAL,
    DECODE,
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


def test_a_peer_that_fails_late_ends_no_run(clock, monkeypatch):
    ours = gpu.PEERS["clearhead"]
    memory = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
    result = measured(
        monkeypatch, CAUSAL, clearhead=ours, empty=fails(RuntimeError()), late=fails(memory, 2)
    )
    assert set(result["peers"]) == {"clearhead"}
    assert result["declined"] == {
        "empty": "RuntimeError", "late": "OutOfMemoryError: CUDA out of memory.",
    }  # fmt: skip


@pytest.mark.parametrize("error", [BadValue("Gave.", "rule.", "way out."), RuntimeError("none")])
@pytest.mark.parametrize("after", [0, 2])
def test_where_clearhead_fails_the_others_are_timed(clock, monkeypatch, error, after):
    flash = gpu.PEERS["sdpa flash"]
    result = measured(monkeypatch, CAUSAL, clearhead=fails(error, after), sdpa_flash=flash)
    assert result["declined"]["clearhead"].startswith(type(error).__name__)
    assert result["peers"]["sdpa flash"]["times ours"] is None


def test_decoding_reads_more_keys_and_values_than_a_cache_holds(clock, monkeypatch):
    read = []
    monkeypatch.setattr(gpu, "seconds_per_call", lambda run: ([run() for _ in range(9)], 1.0)[1])
    measured(
        monkeypatch, DECODE, rounds=1, clearhead=lambda case, q, k, v: lambda: read.append((k, v))
    )
    keys = {k.data_ptr(): k.nbytes + v.nbytes for k, v in read}
    assert sum(keys.values()) >= 1000 > sum(keys.values()) - 448 and len(read) == 10
    assert all(torch.equal(k, read[0][0]) and torch.equal(v, read[0][1]) for k, v in read)


def test_flex_reads_documents_on_the_device(clock, monkeypatch):
    """It is given the ids there: `meta` stands for the device."""
    made = []
    monkeypatch.setattr(torch, "compile", lambda called, **options: called)
    monkeypatch.setattr(ch.documents, "to_block_mask", lambda mask, *a, **k: made.append(mask))
    q = torch.empty(1, 1, 4, 8, device="meta")
    gpu._flex(Case("documents", Tq=4, Tk=4, mask=ch.documents([0, 0, 1, 1])), q, q, q)
    assert made[0].ids.device.type == "meta"


def test_flash_attn_is_timed_where_it_is_installed(monkeypatch):
    def flash_attn_func(q, k, v, *, window_size):
        return q.shape, window_size

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash_attn_func))
    q = torch.randn(1, 2, 7, 8)
    window = ch.window(before=3, after=0)
    for mask, sides in ((ch.causal, (-1, 0)), (ch.everything, (-1, -1)), (window, (3, 0))):
        case = Case("", Tq=7, Tk=7, mask=mask)
        assert gpu._flash_attn(case, q, q, q)() == ((1, 7, 2, 8), sides)
    with pytest.raises(ValueError, match="full, causal and window masks"):
        gpu._flash_attn(Case("", Tq=7, Tk=7, mask=ch.prefix(2)), q, q, q)


# ------------------------------------------------------------------------------ the clock itself


@pytest.fixture
def events(monkeypatch):
    """Events of a device on which every call takes a microsecond."""
    seen = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            seen.append("event")

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            begin, end = (i for i, what in enumerate(seen) if what == "event")
            return 1e-3 * (end - begin - 1)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch.cuda, "_sleep", lambda cycles: (seen.clear(), seen.append(("sleep", cycles)))
    )
    return seen


def test_calls_queue_up_behind_a_pause_and_are_few(events):
    assert gpu.seconds_per_call(lambda: events.append("call")) == pytest.approx(1e-6)
    (sleeps, _), *others = events
    assert sleeps == "sleep" and others == ["event", *["call"] * gpu.MOST_CALLS, "event"]


def test_the_pause_is_as_long_as_the_host_takes(events, monkeypatch):
    """300 us a call: 200 calls would outlast a pause of 20 ms, and the device would wait."""
    clock = iter((0.0, 3e-4))
    monkeypatch.setattr(gpu, "perf_counter", lambda: next(clock))
    gpu.seconds_per_call(lambda: None)
    (_, cycles), *_ = events
    assert cycles >= gpu.MOST_CALLS * 3e-4 * 2e9


def test_the_matrices_of_the_ceilings_are_random_and_made_once(monkeypatch):
    monkeypatch.setattr(gpu, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(gpu, "EDGE", 8)
    monkeypatch.setattr(gpu, "seconds_per_call", lambda run: (run(), 2.0)[1])
    for kept in (gpu._matrices, gpu._memory):
        kept.cache_clear()
    try:
        assert [gpu.product_ceiling(torch.float32) for _ in range(2)] == [8**3, 8**3]
        assert [gpu.read_ceiling() for _ in range(2)] == [512, 512]
        a, b = gpu._matrices(torch.float32)
        assert gpu._matrices.cache_info().misses == gpu._memory.cache_info().misses == 1
        assert len(a.unique()) > 60 and not torch.equal(a, b)
    finally:
        for kept in (gpu._matrices, gpu._memory):
            kept.cache_clear()
