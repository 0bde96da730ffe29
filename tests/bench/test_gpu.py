"""The benchmark of a GPU, where there is none: it refuses, and its logic runs on a CPU by a false
clock."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import bench
import clearhead as ch
from bench import gpu
from bench.cases import Case
from clearhead.core.errors import BadValue
from clearhead.core.problem.check import Options, make_problem
from clearhead_cli import app


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_refuses():
    with pytest.raises(BadValue, match="no CUDA device"):
        bench.measure_gpu(["decode"])


def test_unknown_groups_are_named():
    with pytest.raises(BadValue, match="'prefill', 'long', 'masked', 'decode', 'training', 'look'"):
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


def right(case, q, k, v):
    """A peer that answers by the reference."""
    return lambda: ch.attention(q, k, v, mask=case.mask, engine="steps")


def fails(error, after=0):
    """A peer that fails at a call."""

    def make(case, q, k, v):
        left, answer = iter(range(after)), right(case, q, k, v)

        def run():
            if next(left, None) is None:
                raise error
            return answer()

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
    assert result["engine"] == ch.plan(*case.tensors(), mask=case.mask).engine
    assert bench.table(result)


def test_looking_is_timed_beside_the_output_alone(clock, monkeypatch):
    monkeypatch.setitem(gpu.GROUPS, "look", [Case("look", H=2, G=1, Tq=70, Tk=70, mask=ch.causal)])
    (result,) = bench.measure_gpu(["look"], rounds=1)["results"]
    assert list(result["peers"]) == [
        "clearhead", "look lse, max, entropy", "look topk(8)", "look received, pooled(64, 64)",
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


@pytest.mark.parametrize("error", [BadValue("Gave.", "rule.", "hint."), RuntimeError("none")])
@pytest.mark.parametrize("after", [0, 2])
def test_where_clearhead_fails_the_others_are_timed(clock, monkeypatch, error, after):
    flash = gpu.PEERS["sdpa flash"]
    result = measured(monkeypatch, CAUSAL, clearhead=fails(error, after), sdpa_flash=flash)
    assert result["declined"]["clearhead"].startswith(type(error).__name__)
    assert result["peers"]["sdpa flash"]["times ours"] is None


def test_decoding_reads_more_keys_and_values_than_a_cache_holds(clock, monkeypatch):
    read = []
    monkeypatch.setattr(gpu, "seconds_per_call", lambda run: ([run() for _ in range(9)], 1.0)[1])

    def reads(case, q, k, v):
        return lambda: (read.append((k, v)), right(case, q, k, v)())[1]

    measured(monkeypatch, DECODE, rounds=1, clearhead=reads)
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
    given = []

    def flash_attn_func(q, k, v, *, window_size):
        given.append((q.shape, window_size))
        return q

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=flash_attn_func))
    q = torch.randn(1, 2, 7, 8)
    window = ch.window(before=3, after=0)
    for mask, sides in ((ch.causal, (-1, 0)), (ch.everything, (-1, -1)), (window, (3, 0))):
        case = Case("", Tq=7, Tk=7, mask=mask)
        assert torch.equal(gpu._flash_attn(case, q, q, q)(), q)
        assert given.pop() == ((1, 7, 2, 8), sides)
    with pytest.raises(ValueError, match="full, causal and window masks"):
        gpu._flash_attn(Case("", Tq=7, Tk=7, mask=ch.prefix(2)), q, q, q)


# ------------------------------------------------------------------------- what is not timed


def off(case, q, k, v):
    """A peer that looks away from the last key."""
    mask = case.mask & ~ch.window(before=0, after=0, align="end") if case.masked else case.mask
    return lambda: ch.attention(q, k, v, mask=mask, engine="steps")


def spoiled(number):
    """A peer with one wrong number in its last row."""

    def make(case, q, k, v):
        def run():
            out = right(case, q, k, v)().clone()
            out[-1, -1, -1, 3] = number
            return out

        return run

    return make


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_a_wrong_peer_is_not_timed(clock, monkeypatch, dtype, training):
    case = Case(
        "window", B=2, H=4, G=2, Tq=70, Tk=70, D=8, dtype=dtype, mask=ch.window(before=9, after=0),
        training=training,
    )  # fmt: skip
    peers = {"right": right, "off": off, "other": spoiled(0.5), "nan": spoiled(float("nan"))}
    result = measured(monkeypatch, case, **peers)
    assert set(result["peers"]) == {"right"} and set(result["declined"]) == {"off", "other", "nan"}
    assert all("wrong: a row is off by" in said for said in result["declined"].values())
    assert "off by nan" in result["declined"]["nan"]


def test_products_in_tf32_are_not_timed_as_fp32(clock, monkeypatch):
    def tf32(case, q, k, v):
        q, k, v = ((x.view(torch.int32) & -0x2000).view(torch.float32) for x in (q, k, v))
        return right(case, q, k, v)

    case = Case("fp32", H=1, G=1, Tq=300, Tk=300, mask=ch.causal)
    result = measured(monkeypatch, case, ours=right, tf32=tf32)
    assert set(result["peers"]) == {"ours"} and "wrong" in result["declined"]["tf32"]


@pytest.mark.parametrize("mask", [
    ch.everything, ch.causal, ch.window(before=9, after=0),
    ch.causal & (ch.window(before=9, after=0) | ch.prefix(4)),
    ch.documents(torch.arange(100) // 7),
], ids=["all", "causal", "window", "window and prefix", "documents"])  # fmt: skip
def test_the_rows_that_are_checked_are_true(mask):
    case = Case("rows", B=2, H=4, G=2, Tq=100, Tk=100, D=8, mask=mask)
    queries, rows = gpu._true_rows(case, *case.tensors())
    assert len(queries) == gpu.ROWS and queries[0] == 0 and queries[-1] == 99
    true = ch.attention(*(x.double() for x in case.tensors()), mask=mask, engine="steps")
    torch.testing.assert_close(rows, true[:, :, queries])


def waits(*outcomes):
    """In place of waiting for the device: None where all is well, else what is raised."""
    left = iter(outcomes)

    def wait():
        if (error := next(left, None)) is not None:
            raise error

    return wait


def test_a_fault_that_comes_late_is_the_peers_that_caused_it(clock, monkeypatch):
    monkeypatch.setattr(gpu, "_wait", waits(RuntimeError("CUDA error: misaligned")))
    result = measured(monkeypatch, CAUSAL, faulty=right, clearhead=right)
    assert result["declined"] == {"faulty": "RuntimeError: CUDA error: misaligned"}
    assert set(result["peers"]) == {"clearhead"}


def test_a_fault_that_stays_ends_the_run_by_name(clock, monkeypatch):
    lost = RuntimeError("CUDA error: an illegal memory access")
    monkeypatch.setattr(gpu, "_wait", waits(None, lost, lost))
    with pytest.raises(BadValue, match="'faulty' left the GPU in an error in the case 'causal'"):
        measured(monkeypatch, CAUSAL, clearhead=right, faulty=right, later=right)


def test_a_fault_in_the_timing_is_found_before_the_ceiling(clock, monkeypatch):
    lost = RuntimeError("CUDA error: an illegal memory access")
    monkeypatch.setattr(gpu, "_wait", waits(None, lost))
    ceilings = []
    monkeypatch.setattr(gpu, "product_ceiling", lambda dtype: ceilings.append(1) or 1e6)
    with pytest.raises(BadValue, match="'faulty' left the GPU"):
        measured(monkeypatch, CAUSAL, faulty=fails(lost, after=1))
    assert len(ceilings) == 1


def test_a_run_says_by_what_it_was_made(clock, monkeypatch):
    monkeypatch.setitem(gpu.GROUPS, "masked", [])

    def says(command, **keywords):
        return subprocess.run(["echo", "580.95.05\n580.95.05"], **keywords)

    monkeypatch.setattr(gpu, "subprocess", SimpleNamespace(**vars(subprocess) | {"run": says}))
    about = bench.measure_gpu(["masked"])["about"]
    assert list(about) == ["device", "torch", "triton", "cuda", "driver"]
    assert about["driver"] == "580.95.05" and about["cuda"] == torch.version.cuda
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(gpu, "subprocess", subprocess)
    assert gpu._driver() is None
    monkeypatch.setitem(sys.modules, "triton", None)
    assert gpu._triton() is None


# ------------------------------------------------------------------------------ the clock itself


class Device:
    """A false one: every launch takes it a microsecond, and it queues up so many while it pauses.
    The host, whose clock is false, too, takes `host` for a call, but for some calls."""

    def __init__(self, host=1e-5, launches=1, room=10**6, syncs=False, hiccups=()):
        self.host, self.launches, self.room, self.syncs = host, launches, room, syncs
        self.hiccups = dict(hiccups)
        self.now = self.ready = 0.0  # of the host's clock: when all that is queued is done
        self.queued, self.calls = 0, 0
        self.samples = []  # (pause, calls) of each

    def run(self):
        self.now += self.hiccups.get(self.calls, self.host)
        self.calls += 1
        self.samples[-1:] = [(pause, calls + 1) for pause, calls in self.samples[-1:]]
        for _ in range(self.launches):
            if self.ready <= self.now:
                self.queued = 0
            self.queued += 1
            if self.queued > self.room:  # the host waits until the pause is over
                self.now, self.queued = max(self.now, self.resumes), 1
            self.ready = max(self.ready, self.now) + 1e-6
        if self.syncs:
            self.now = max(self.now, self.ready)

    def pause(self, cycles):
        self.samples.append((cycles / gpu.CLOCK, 0))
        self.queued = 0
        self.ready = self.resumes = max(self.now, self.ready) + cycles / gpu.CLOCK

    def event(self, enable_timing):
        assert enable_timing
        device, event = self, SimpleNamespace(at=None)

        def record():
            event.at = max(device.now, device.ready)

        def synchronize():
            device.now = max(device.now, event.at)

        event.record, event.synchronize = record, synchronize
        event.query = lambda: device.now >= event.at
        event.elapsed_time = lambda other: (other.at - event.at) * 1e3
        return event


@pytest.fixture
def on(monkeypatch):
    def put(**traits):
        device = Device(**traits)
        monkeypatch.setattr(torch.cuda, "Event", device.event)
        monkeypatch.setattr(torch.cuda, "_sleep", device.pause)
        monkeypatch.setattr(gpu, "perf_counter", lambda: device.now)
        return device, gpu.seconds_per_call(device.run)

    return put


def test_calls_queue_up_behind_a_pause_and_are_few(on):
    device, seconds = on()
    assert seconds == pytest.approx(1e-6)
    assert [calls for _, calls in device.samples] == [1, gpu.MOST_CALLS]


def test_the_pause_is_as_long_as_the_host_takes(on):
    """300 us a call: 200 calls would outlast a pause of 20 ms, and the device would wait."""
    device, seconds = on(host=3e-4)
    assert seconds == pytest.approx(1e-6)
    assert device.samples[-1] == (pytest.approx(2 * 200 * 3e-4), 200)


def test_one_slow_call_of_the_host_makes_no_long_pause(on):
    device, seconds = on(hiccups={2: 0.05, 4: 0.05})
    assert seconds == pytest.approx(1e-6) and device.samples[-1] == (gpu.SHORTEST_PAUSE, 200)


@pytest.mark.parametrize("host, calls", [(0.02, 50), (0.7, 1), (1.9, 1)])
def test_no_pause_is_longer_than_two_seconds(on, host, calls):
    device, seconds = on(host=host)
    assert max(pause for pause, _ in device.samples) <= 2
    assert device.samples[-1][1] == calls and seconds == pytest.approx(1e-6)


def test_fewer_calls_are_timed_where_the_queue_is_short(on):
    """12 launches a call: 85 calls fill a queue of 1024."""
    device, seconds = on(launches=12, room=1024)
    assert [calls for _, calls in device.samples] == [1, 200, 100, 50]
    assert seconds == pytest.approx(12e-6)


def test_a_call_that_waits_for_the_device_is_timed_all_the_same(on):
    device, seconds = on(syncs=True)
    assert [calls for _, calls in device.samples] == [1, gpu.MOST_CALLS]
    assert seconds > 1e-6


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
