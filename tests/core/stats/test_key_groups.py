"""Masses on groups of keys, by ids and by distance, against dense float64 matrices."""

import pickle
from functools import partial

import pytest
import torch

import clearhead as ch
from clearhead.core.engines.cpu.extension import core, use_level
from clearhead.core.masks import Grid, duplicate_keys, induction_keys, key_group as module
from clearhead.core.masks.data import documents
from clearhead.core.masks.key_group import key_groups
from clearhead.core.problem.check import Options, make_problem
from clearhead.core.stats import sweep
from clearhead.models.roles.role_keys import RoleKeys
from tests.core.stats.test_weighted import WAYS

B, H, G, T, D = 2, 4, 2, 419, 8  # several blocks of keys, and a last block of queries that is short
FAR = ch.window(before=None, after=0, align=-64)


def drawn(T=T, dtype=torch.float32, requires_grad=False):
    g = torch.Generator().manual_seed(3)
    q, k = (torch.randn(B, n, T, D, generator=g).to(dtype) for n in (H, G))
    ids = torch.randint(0, 40, (B, T), generator=g)
    ids[0, ::7] = ids[0, 1]  # one token is frequent
    return q.requires_grad_(requires_grad), k.requires_grad_(requires_grad), ids


def distances(T):
    """Masks of the distances 0, 1, 2 to 3, 4 to 7, and so on."""
    starts = [0, *(2**i for i in range(T.bit_length()))]
    return {str(n): ch.window(max(n - 1, 0), 0, align=-n) for n in starts}


def groups_of(ids):
    packed = torch.arange(ids.shape[1]) // 150
    return {
        **distances(ids.shape[1]),
        "first": ch.prefix(1),
        "far": FAR,
        "near": ch.window(before=9, after=3),
        "not near": ~ch.window(before=9, after=3),
        "either": ch.prefix(2) | FAR,
        "odd": ch.dense(keep=torch.arange(ids.shape[1]) % 2 == 1),
        "span": (100, 300),
        "duplicate": duplicate_keys(ids),
        "induction": induction_keys(ids),
        "in document": ch.documents(packed) & duplicate_keys(ids),
        "as queries": ch.documents(ids[:1], queries=ids.flip(1)) & ch.prefix(300),
    }


def cells_of(groups):
    one = ch.prefix(300) & ~ch.prefix(100)
    masks = {name: one if name == "span" else x for name, x in groups.items()}
    return {name: x.to_bool(T, T) for name, x in masks.items()}


@pytest.mark.parametrize(("engine", "learns"), WAYS)
@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        (ch.causal, torch.float32),
        (ch.documents(torch.arange(T) // 211), torch.float32),
        (None, torch.bfloat16),
    ],
    ids=["causal", "documents", "bfloat16"],
)
def test_masses_are_those_of_dense_weights(engine, learns, mask, dtype):
    q, k, ids = drawn(dtype=dtype, requires_grad=learns)
    n = torch.rand(B, H, T, generator=torch.Generator().manual_seed(4))
    groups = groups_of(ids)
    wanted = [ch.mass(groups), ch.weighted(n, groups), ch.value_weighted(groups, by=n)]
    seen = ch.look(q, k, k, mask=mask, stats=wanted, engine=engine)
    weights = ch.matrix(q.double(), k.double(), mask=mask).to_dense()
    moved = weights * n.double().unsqueeze(2)
    for name, cells in cells_of(groups).items():
        close = dict(rtol=1e-4, atol=2e-6, check_dtype=False)
        torch.testing.assert_close(seen.mass[name], (weights * cells).sum(-1), **close)
        of_group = (moved * cells).sum(-1)
        torch.testing.assert_close(seen.weighted[name], of_group, **close)
        torch.testing.assert_close(seen.value_weighted[name], of_group / moved.sum(-1), **close)


@pytest.mark.parametrize("level", [name for name, _, present in core.levels() if present])
def test_every_level_of_the_core_sums_the_same_masses(level):
    q, k, ids = drawn(dtype=torch.bfloat16)
    n = torch.rand(T, generator=torch.Generator().manual_seed(4))
    wanted = [ch.mass(groups_of(ids)), ch.weighted(n, groups_of(ids))]
    tiled, before = ch.look(q, k, k, mask=ch.causal, stats=wanted, engine="tiled"), use_level(level)
    try:
        seen = ch.look(q, k, k, mask=ch.causal, stats=wanted, engine="cpu")
    finally:
        use_level(before)
    for name in groups_of(ids):
        for of_core, of_torch in ((seen.mass, tiled.mass), (seen.weighted, tiled.weighted)):
            torch.testing.assert_close(of_core[name], of_torch[name], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(("engine", "learns"), WAYS)
def test_a_nan_stays_where_its_key_is_seen(engine, learns):
    q, k, ids = drawn(requires_grad=learns)
    k = k.clone()
    k[0, 0, 200] = torch.nan  # of two query heads, from query 200 on
    seen = ch.look(q, k, k, mask=ch.causal, stats=[ch.mass(groups_of(ids))], engine=engine)
    for name in ("duplicate", "first", "64", "either"):
        assert not seen.mass[name][0, :2, :200].isnan().any()
        assert not seen.mass[name][0, 2:].isnan().any() and not seen.mass[name][1].isnan().any()


@pytest.mark.parametrize("engine", ["cpu", "tiled"])
def test_gradients_are_those_of_dense_weights(engine):
    q, k, ids = drawn(requires_grad=True)
    groups = {name: x for name, x in groups_of(ids).items() if name in ("8", "far", "induction")}
    seen = ch.look(q, k, k, mask=ch.causal, stats=["entropy", ch.mass(groups)], engine=engine)
    double = [x.detach().double().requires_grad_() for x in (q, k)]
    weights = ch.matrix(*double, mask=ch.causal, engine="steps").to_dense()
    g = torch.Generator().manual_seed(5)
    directions = {name: torch.randn(B, H, T, generator=g) for name in groups}
    ours = sum((seen.mass[name] * directions[name]).sum() for name in groups)
    dense = sum(((weights * groups[n].to_bool(T, T)).sum(-1) * directions[n]).sum() for n in groups)
    for x, y in zip(
        torch.autograd.grad(ours, (q, k)), torch.autograd.grad(dense, double), strict=True
    ):
        torch.testing.assert_close(x, y.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("engine", ["cpu", "tiled"])
def test_ids_are_not_turned_into_ranges(engine, monkeypatch):
    def refuse(*_):
        raise AssertionError("ranges of ids take the memory of a matrix")

    q, k, ids = drawn(requires_grad=True)
    masks = {"duplicate": duplicate_keys(ids), "induction": induction_keys(ids)}
    monkeypatch.setattr(documents, "compute_key_ranges", refuse)
    seen = ch.look(q, k, k, mask=ch.causal, stats=[ch.mass(masks)], engine=engine)
    seen.mass["induction"].sum().backward()
    with pytest.raises(AssertionError, match="memory of a matrix"):
        masks["duplicate"].key_ranges(Grid(T, T, B, H))


def test_shards_of_keys_merge():
    q, k, ids = drawn()
    masks = {"duplicate": duplicate_keys(ids), "far": FAR}
    problem, inputs = make_problem(q, k, k, Options(mask=ch.causal))
    one, two = (
        sweep(problem, inputs, [ch.mass(masks)], keys=keys) for keys in (slice(0, 97), slice(97, T))
    )
    merged = one.merge(two).finish()["mass"]
    seen = ch.look(q, k, k, mask=ch.causal, stats=[ch.mass(masks)])
    for name in masks:
        torch.testing.assert_close(merged[name], seen.mass[name], rtol=1e-5, atol=1e-6)


def test_the_keys_are_those_of_the_roles_of_heads():
    tokens = torch.tensor([5, 5, 3, 5, 5, 5, 3, 7, 5, 3, 3, 3])
    T = len(tokens)
    keep = ch.causal.to_bool(T, T)
    at = torch.arange(T)
    roles = RoleKeys(at, at, tokens, tokens, keep, {}, 0, True).voted
    assert torch.equal((duplicate_keys(tokens) & ch.causal).to_bool(T, T), roles["duplicate"])
    assert torch.equal((induction_keys(tokens) & ch.causal).to_bool(T, T), roles["induction"])
    assert induction_keys(tokens).to_bool(T, T)[6].nonzero().flatten().tolist() == [3]
    assert duplicate_keys(tokens).to_bool(T, T)[5].nonzero().flatten().tolist() == [1, 3]


def test_more_positions_than_the_kernels_distinguish_are_refused(monkeypatch):
    monkeypatch.setattr(module, "MOST_IDS", 30)
    q, k, ids = drawn()
    stats = [ch.mass({"duplicate": duplicate_keys(ids)})]
    with pytest.raises(ch.BadValue, match=r"ids of 838 queries and keys"):
        ch.look(q, k, k, mask=ch.causal, stats=stats, engine="cpu")
    ch.look(q, k, k, mask=ch.causal, stats=stats, engine="tiled")


def test_a_group_keeps_bands_and_ids_apart():
    mask = duplicate_keys(torch.arange(9)) & ch.prefix(4)
    (group,) = key_groups([mask], Grid(9, 9, 1, 1), None)
    assert repr(group.rule) == "~window(before=1, after=None) & ~prefix(1) & prefix(4)"
    assert (~ch.window(before=1, after=None)).band(Grid(9, 9, 1, 1)) == (2**60, -2)


def test_a_mask_stores_its_group_until_it_changes():
    q, k, ids = drawn()
    mask, grid = documents(ids) & ch.window(before=9), Grid(T, T, B, H)
    (first,) = key_groups([mask], grid, q.device)
    assert key_groups([mask], grid, q.device) == [first]
    assert key_groups([mask], Grid(T, T, B, H + 1), q.device) != [first]
    look = partial(ch.look, q, k, k, mask=ch.causal)
    stats = [ch.mass({"own": mask})]
    before = look(stats=stats).mass["own"]
    with torch.inference_mode():
        assert key_groups([mask], grid, q.device) != [first]
    mask.parts[0].ids.fill_(1)  # one document
    after = look(stats=stats).mass["own"]
    assert after.equal(look(stats=[ch.mass({"own": ch.window(before=9)})]).mass["own"])
    assert not after.equal(before)


def test_a_group_of_a_gpu_is_stored_for_a_stream_but_not_in_a_captured_graph(monkeypatch):
    """The streams are described; None is a capture."""
    mask, grid, gpu = ch.window(before=9), Grid(T, T, B, H), torch.device("cuda")

    def group_on(stream):
        monkeypatch.setattr(module, "stream_of", lambda device: stream)
        return key_groups([mask], grid, gpu)[0]

    assert group_on(None) is not group_on(None)
    first = group_on(5)
    assert group_on(5) is first is group_on(None)
    assert mask.__dict__["_captured"] == {first}
    assert group_on(6) is not first


def test_a_statistic_stores_its_groups_until_a_mask_or_the_sizes_change():
    q, k, ids = drawn()
    mask = documents(ids) & ch.window(before=9)
    by_id, band = ch.mass({"own": mask}), ch.mass({"last": ch.window(before=2, align="end")})

    def must_be_equal(statistic, q, k):
        stored = statistic.masks_for_core(make_problem(q, k, k)[0])
        for name, group in statistic.groups.items():
            seen = ch.look(q, k, k, stats=[statistic]).mass[name]
            wanted = ch.look(q, k, k, stats=[ch.mass({name: group})], engine="tiled").mass[name]
            torch.testing.assert_close(seen, wanted, rtol=1e-4, atol=1e-5)
        assert statistic.masks_for_core(make_problem(q, k, k)[0]) is stored

    must_be_equal(by_id, q, k)
    mask.parts[0].ids.fill_(1)  # one document
    must_be_equal(by_id, q, k)
    for Tk in (7, 5):
        must_be_equal(band, q[:, :, :5], k[:, :, :Tk])
    assert not {"_core", "_fits"} & pickle.loads(pickle.dumps(band)).__dict__.keys()


def test_bits_are_not_stored():
    mask = ch.dense(keep=torch.rand(7, 7, generator=torch.Generator().manual_seed(0)) > 0.5)
    (first,) = key_groups([mask], Grid(7, 7, 1, 1), None)
    assert first.ranges.bits is not None and key_groups([mask], Grid(7, 7, 1, 1), None) != [first]
