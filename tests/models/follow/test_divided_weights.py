"""Heads that tensor parallelism divides over ranks have other numbers, so they are refused."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import clearhead as ch


@pytest.fixture
def mesh(request) -> Iterator[DeviceMesh]:
    """Ranks of which only this one exists; the others send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield init_device_mesh("cpu", (request.param,))
    dist.destroy_process_group()


def divided(mesh: DeviceMesh, parts: dict[str, object]) -> torch.nn.Module:
    return parallelize_module(ch.nn.TransformerBlock(12, 4, causal=True).eval(), mesh, parts)


ATTENTION = {f"attention.W_{x}": ColwiseParallel() for x in ("query", "key", "value")}
ATTENTION["attention.out_proj"] = RowwiseParallel()
MLP = {"feed_forward.W_1": ColwiseParallel(), "feed_forward.W_2": RowwiseParallel()}
CALLS = {
    "watch": lambda model, x: ch.watch(model),
    "intervene": lambda model, x: ch.intervene(model, [ch.edits.ablate(heads=[0])]),
    "effects": lambda model, x: ch.effects(model, x, lambda out: out.sum(), progress=False),
}


@pytest.mark.parametrize("mesh", [2], indirect=True)
@pytest.mark.parametrize("name", CALLS)
def test_divided_heads_are_refused(name, mesh):
    model, x = divided(mesh, ATTENTION), torch.randn(1, 5, 12)
    with torch.no_grad():
        model(x)  # it runs
    with pytest.raises(ch.BadValue, match=r"The heads of attention are divided over ranks"):
        with torch.no_grad(), CALLS[name](model, x):
            model(x)


@pytest.mark.parametrize("mesh", [2], indirect=True)
def test_attribution_needs_whole_weights(mesh):
    model = divided(mesh, MLP)
    with pytest.raises(ch.BadValue, match="whose weights are divided over ranks"):
        ch.logit_attribution(model, torch.arange(4))


@pytest.mark.parametrize(
    ("mesh", "parts"), [(1, ATTENTION), (2, MLP)], indirect=["mesh"], ids=["one rank", "no heads"]
)
def test_whole_heads_are_watched(mesh, parts):
    model, x = ch.nn.TransformerBlock(12, 4, causal=True).eval(), torch.randn(1, 5, 12)
    with torch.no_grad(), ch.watch(model, stats=["entropy"]) as right:
        model(x)
    parallelize_module(model, mesh, parts)
    with torch.no_grad(), ch.watch(model, stats=["entropy"]) as found:
        model(x)
    torch.testing.assert_close(found[0].entropy, right[0].entropy)


@pytest.mark.outside  # it imports transformers
@pytest.mark.parametrize("call", ["logit_attribution", "circuits"])
def test_offloaded_weights_are_named(call, tmp_path):
    """accelerate loads them while a module runs, so the model itself can run."""
    import accelerate

    from tests.hf.test_models import build

    model = build("llama", "AutoModelForCausalLM")
    model.set_attn_implementation("clearhead")
    ids = torch.arange(3, 10)[None]
    plain = [e.exact for e in ch.effects(model, ids, estimate=False)]
    model = accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(ch.BadValue, match=r"is on the meta device[^!]*without offloading"):
        ch.circuits(model) if call == "circuits" else ch.logit_attribution(model, ids)
    for _ in range(2):
        again = ch.effects(model, ids, estimate=False, to=tmp_path / "effects")
        assert [e.exact for e in again] == pytest.approx(plain, abs=1e-6)
