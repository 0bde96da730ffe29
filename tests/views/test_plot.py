"""The figures: they hold the numbers of the trace, name its tokens, and can be saved."""

import builtins
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead import demo
from clearhead.core.functional.trace import Step, Trace
from clearhead.models.effects.compare_caches import CacheDamage, HeadDamage
from clearhead.models.report import Report
from clearhead.views import plot, text
from clearhead.views.plot.canvas import drawable, weight_ink
from clearhead.views.plot.report import BLOCKED

Figure = pytest.importorskip("matplotlib.figure").Figure

TOKENS = ["Once", "$x^2$", "\x1b[31m", "大", "\u202egnp"]
LABELS = ["Once", "$x^2$", "⟨241B⟩[31m", "⟨5927⟩", "⟨202E⟩gnp"]


def trace(n=5, *, H=4, G=2, tokens=None, Dv=3, **options) -> Trace:
    draw = torch.Generator().manual_seed(23)
    q = torch.randn(H, n, 7, generator=draw)
    k = torch.randn(G, n, 7, generator=draw)
    v = torch.randn(G, n, Dv, generator=draw)
    return ch.explain(q, k, v, tokens=tokens, **options)


def labels(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def cells(ax) -> np.ma.MaskedArray:
    return ax.images[0].get_array()


def test_the_parts_of_a_logit_are_those_of_one_position():
    teller = demo.load()
    ids = torch.tensor(teller.encode("Long ago there lived a funny mouse.").ids)
    parts = ch.logit_attribution(teller.model, ids)
    figure = plot.attribution(parts, position=3)
    heads, mlps = figure.axes[:2]
    np.testing.assert_allclose(cells(heads), parts.heads[:, :, 3], rtol=1e-6)
    np.testing.assert_allclose([bar.get_width() for bar in mlps.patches], parts.mlps[:, 3])
    numbers = [label.get_text() for label in mlps.texts]
    assert numbers == [f"{x:.2f}" for x in parts.mlps[:, 3].tolist()]
    title = f"position 3: logit {float(parts.logit[3]):.2f}, embedding"
    assert figure.get_suptitle().startswith(title)
    with pytest.raises(ch.BadValue, match="Position 99 was requested"):
        plot.attribution(parts, position=99)


@pytest.mark.parametrize("layer", [0, 1])
def test_the_bars_of_a_score_sum_to_its_contrast(layer):
    """With fewer components than bars, and with more."""
    teller = demo.load()
    words = teller.encode("Long ago there lived a funny mouse.")
    ids = torch.tensor(words.ids)
    reasons = ch.why(teller.model, ids, layer=layer, head=2, query=5, key=3, tokens=words.tokens)
    figure = plot.why(reasons)
    for ax, parts in zip(figure.axes, (reasons.key_parts, reasons.query_parts), strict=True):
        widths = [bar.get_width() for bar in ax.patches]
        assert abs(sum(widths) - reasons.contrast) < 1e-5
        assert abs(widths[0]) == pytest.approx(float(parts.abs().max()), rel=1e-6)
        names = [str(reasons.components[i]) for i in parts.abs().argsort(descending=True)[:8]]
        others = len(parts) - 8
        assert labels(ax.yaxis) == names + [f"{others} others"] * (others > 0)
    assert figure.get_suptitle().replace("\n", " ") == reasons.sentence()


def test_a_heat_map_holds_the_weights_of_one_head_and_its_tokens():
    it = trace(mask=ch.causal, tokens=TOKENS)
    ax = plot.heatmap(it, head=2)
    seen = torch.tril(torch.ones(5, 5)) > 0
    assert np.array_equal(cells(ax).mask, ~seen.numpy())
    expected = it["weights"][2].double().numpy()
    assert np.array_equal(cells(ax).compressed(), expected[seen.numpy()])
    assert labels(ax.xaxis) == labels(ax.yaxis) == LABELS
    # A token between dollars is no formula.
    assert not any(label.get_parse_math() for label in ax.get_xticklabels() + ax.get_yticklabels())
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("query", "key")
    assert ax.get_title() == "weights = softmax(masked)\nhead 2"
    # A number in every cell that is not blocked, at its place; the others are hatched.
    written = {text.get_position(): text.get_text() for text in ax.texts}
    assert written == {(j, i): f"{expected[i, j]:.2f}" for i in range(5) for j in range(i + 1)}
    [hatch] = ax.patches
    assert hatch.get_hatch() and len(hatch.get_path().to_polygons()) == 10


def test_a_heat_map_is_drawn_on_given_axes():
    figure = Figure()
    ax = figure.add_subplot()
    assert plot.heatmap(trace(), "key", 3, ax) is ax
    assert np.array_equal(cells(ax), trace()["key"][1].double().numpy())
    assert ax.get_title() == "key = K\nkey head 1, read by heads 2 and 3"
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("key", "feature")


def test_before_the_projections_a_row_is_a_token():
    it = ch.nn.SimpleAttention().explain(torch.ones(3, 2))
    assert plot.heatmap(it, "inputs").get_ylabel() == "token"


def test_large_maps_carry_fewer_labels_and_no_numbers():
    it = trace(90, H=1, G=1, mask=ch.causal, tokens=[f"t{i}" for i in range(90)])
    ax = plot.heatmap(it)
    assert not ax.texts and not ax.patches
    assert labels(ax.yaxis) == [f"t{i}" for i in range(0, 90, 3)] and len(ax.get_yticks()) == 30


def test_all_heads_share_one_range_and_one_scale():
    it = trace(H=6, G=3)
    figure = plot.heads(it)
    *maps, scale = figure.axes
    assert [ax.get_title() for ax in maps] == [f"head {i}" for i in range(6)]
    for i, ax in enumerate(maps):
        given = it["weights"][i].double().numpy()
        assert np.array_equal(cells(ax), given)
    assert {ax.images[0].get_clim() for ax in maps} == {(0.0, 1.0)}
    limit = float(it["scaled"].abs().max())
    for ax in plot.heads(it, "scaled").axes[:-1]:
        assert ax.images[0].get_clim() == (-limit, limit)
    assert not scale.images
    assert figure._suptitle.get_text().startswith("weights = softmax(scaled)")
    assert plot.heads(ch.explain(*torch.randn(3, 2, 5))).axes[0].get_title() == ""  # a lone head


@pytest.mark.parametrize("tokens", [TOKENS, None])
def test_a_part_has_the_range_of_the_terminal_and_its_positions(capsys, tokens):
    weights = torch.rand(1, 1, 5, 5, generator=torch.Generator().manual_seed(0)) / 50
    step = Step("weights", "", "", "b h q k", weights)
    it = Trace((step,), tokens, tokens, first={"h": 3, "q": 700, "k": 0})
    text.heat(it)
    *_, legend = filter(None, capsys.readouterr().out.splitlines())
    most = float(weights.max())
    assert f"█ {0.64 * most:.4f}" in legend
    drawn, scale = plot.heads(it).axes
    assert drawn.images[0].get_clim() == (0.0, pytest.approx(most))
    assert scale.get_yticks() == pytest.approx([0, 0.1 * most, 0.5 * most, most], abs=1e-9)
    for ax in (drawn, plot.heatmap(it)):
        for axis, first in ((ax.yaxis, 700), (ax.xaxis, 0)):
            words = LABELS if tokens else [""] * 5
            assert labels(axis) == [f"{first + i} {word}".rstrip() for i, word in enumerate(words)]
    assert plot.heatmap(it).get_title() == f"weights\nhead 3\ncolours 0 to {most:.3g}"
    even = Step("weights", "", "", "b h q k", weights.clamp(min=0.6 * most))
    ax, _ = plot.heads(replace(it, steps=(even,))).axes
    assert ax.images[0].get_clim() == pytest.approx((0.6 * most, most))  # as in the terminal
    nothing = Step("weights", "", "", "b h q k", torch.zeros(1, 1, 5, 5))
    assert plot.heatmap(replace(it, steps=(nothing,))).images[0].get_clim() == (0.0, 1.0)


def test_the_chain_runs_from_the_scores_to_the_output():
    it = trace(mask=ch.causal, tokens=["a", "b", "c", "d", "e"])
    axes = plot.steps(it, head=1).axes
    titles = [ax.get_title().splitlines()[0] for ax in axes]
    assert titles == ["scores", "→ scaled", "→ masked", "→ weights", "→ output"]
    assert axes[1].get_title().splitlines()[1] == "scores / √7 = scores · 0.378"
    for ax, name in zip(axes, it.names[3:], strict=True):
        given, drawn = it[name][1].double().numpy(), cells(ax)
        assert np.array_equal(drawn.compressed(), given[~np.ma.getmaskarray(drawn)])
    assert labels(axes[0].yaxis) == ["a", "b", "c", "d", "e"] and labels(axes[1].yaxis) == []
    everything = trace(mask=ch.causal, softcap=5.0, bias=ch.alibi(), dropout=0.5, seed=1)
    assert len(plot.steps(everything).axes) == 8


def test_grids_are_drawn_into_a_given_figure():
    whole = Figure(figsize=(9, 9), layout="constrained")
    upper, lower = whole.subfigures(2)
    assert plot.heads(trace(), figure=upper) is upper
    assert plot.steps(trace(), figure=lower) is lower
    assert len(upper.axes) == 5 and len(lower.axes) == 4


@pytest.mark.parametrize(
    ("name", "magic"), [("a.png", b"\x89PNG"), ("b.svg", b"<?xml"), ("c.PDF", b"%PDF")]
)
def test_figures_are_saved_and_are_the_same_bytes_each_time(tmp_path, name, magic):
    it = trace(mask=ch.causal, tokens=TOKENS)
    paths = [tmp_path / f"{i}-{name}" for i in range(2)]
    first, second = (plot.save(plot.heatmap(it).figure, path).read_bytes() for path in paths)
    assert first.startswith(magic) and first == second


def test_what_cannot_be_saved_is_refused(tmp_path):
    figure = plot.steps(trace())
    with pytest.raises(ch.BadValue) as error:
        plot.save(figure, tmp_path / "picture.bmp")
    assert "'picture.png'" in error.value.hint and ".png, .svg, .pdf" in error.value.rule
    with pytest.raises(ch.BadValue, match="No such file or directory"):
        plot.save(figure, tmp_path / "missing" / "picture.png")
    with pytest.raises(ch.BadType, match="a list"):
        plot.save([figure], tmp_path / "picture.png")
    assert plot.save(plot.heatmap(trace()), tmp_path / "axes.png").stat().st_size > 1000
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ch.BadValue, match="Is a directory"):
        plot.save(figure, str(tmp_path / "folder.png"))


def test_characters_that_the_font_lacks_are_written_out():
    assert drawable("naïve √ Σ ∞") == "naïve √ Σ ∞"
    assert drawable("大x\n") == "⟨5927⟩x\n"


def test_nan_is_drawn_without_a_warning(tmp_path):
    odd = torch.tensor([[math.nan, math.inf], [-math.inf, 2.0]])
    blank = Trace((Step("weights", "", "", "q k", torch.zeros(1, 1)),))
    for it in (Trace((Step("weights", "", "", "q k", odd),)), blank):
        plot.save(plot.heatmap(it).figure, tmp_path / "odd.png")
        plot.save(plot.heads(it), tmp_path / "odd.png")
    assert [t.get_text() for t in plot.heatmap(blank).texts] == ["0.00"]


def test_no_figure_is_kept_and_no_window_opened():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    plot.heads(trace()), plot.steps(trace())
    assert pyplot.get_fignums() == []


def test_missing_steps_and_heads_are_refused():
    with pytest.raises(ch.BadValue, match="There is no step 'capped'"):
        plot.heads(trace(), "capped")
    with pytest.raises(ch.BadValue, match="Head 4 was requested"):
        plot.steps(trace(), head=4)
    empty = torch.zeros(0, 3)
    with pytest.raises(ch.BadValue, match="has none"):
        plot.heatmap(ch.explain(torch.zeros(2, 3), empty, empty))


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    whole = builtins.__import__

    def without(name, *arguments, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return whole(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    for draw in (
        lambda: plot.heatmap(trace()),
        lambda: plot.heads(trace()),
        lambda: plot.steps(trace()),
        lambda: plot.save(None, "a.png"),
    ):
        with pytest.raises(ch.BadValue) as error:
            draw()
        assert error.value.hint.endswith(" -m pip install 'matplotlib>=3.8'")


# ---- figures of a report --------------------------------------------------------------


def findings(T=5, *, layers=3, H=2, tokens=None, name="toy") -> Report:
    """A report with what the figures read, in numbers that are easy to recognise."""
    draw = torch.Generator().manual_seed(5)
    tokens = tokens or [f"t{i}" for i in range(T)]
    found = [
        SimpleNamespace(
            query_tokens=tokens,
            key_tokens=tokens,
            queries=T,
            max_entropy=2.0,
            picture=None,
            heads=[SimpleNamespace(label="next token", entropy=i + h / 4) for h in range(H)],
            pooled=torch.rand(H, min(T, 64), min(T, 64), generator=draw),
            allowed=torch.ones(min(T, 64), min(T, 64), dtype=torch.bool).tril(),
            received=torch.rand(H, T, generator=draw),
        )
        for i in range(layers)
    ]
    return Report(name, tuple(tokens), tuple(found))


def test_entropy_by_layer_has_a_dot_a_head_and_a_line_through_the_means():
    figure = Figure()
    ax = figure.add_subplot()
    assert plot.entropy_by_layer(findings(), ax) is ax
    *dots, means, most = ax.lines
    assert [list(line.get_ydata()) for line in dots] == [[i, i + 0.25] for i in range(3)]
    assert list(means.get_ydata()) == [0.125, 1.125, 2.125] and list(most.get_ydata()) == [2.0] * 3
    assert ax.get_xlabel() == "layer" and ax.get_ylim()[0] == 0
    assert plot.entropy_by_layer(findings(name="$x^2$")).get_title() == "$x^2$"


def test_one_head_of_a_report_is_its_map_with_tokens():
    report = findings(tokens=TOKENS)
    ax = Figure().add_subplot()
    assert plot.head(report, 1, 0, ax) is ax
    drawn = np.ma.masked_invalid(cells(ax))
    allowed = np.tri(len(TOKENS)) > 0
    weights = report.layers[1].pooled[0].double().numpy()
    assert np.array_equal(drawn[allowed], weights[allowed])
    assert labels(ax.xaxis) == labels(ax.yaxis) == LABELS
    assert ax.get_title() == "L1H0: next token\ntoy" and ax.get_ylabel() == "query"
    # Of a long text a cell is named by its first token.
    ax = plot.head(findings(128, layers=1), 0, 1)
    assert cells(ax).shape == (64, 64)
    assert {label.removeprefix("t") for label in labels(ax.yaxis)} <= {
        str(2 * i) for i in range(64)
    }


def test_a_head_that_is_not_there():
    for layer, head in ((0, 2), (3, 0), (-1, 0)):
        with pytest.raises(ch.BadValue, match=f"Head {head} of layer {layer}"):
            plot.head(findings(), layer, head)


def test_every_head_has_its_map():
    report = findings()
    [grid] = plot.model(report).axes
    assert [x.get_text() for x in grid.texts] == ["0 next token", "1 next token"] * 3
    assert [x.get_text() for x in grid.get_yticklabels()] == ["layer 0", "layer 1", "layer 2"]
    ink, scale = weight_ink()
    for layer, image in zip(report.layers, grid.images, strict=True):
        for pooled, map in zip(layer.pooled, np.split(image.get_array(), 2, 1), strict=True):
            expected = ink(scale(pooled.double().numpy()))
            expected[np.tri(5) == 0] = BLOCKED
            assert np.array_equal(map[:, :5], expected) and not map[:, 5:, 3].any()


def damage(kls, dropped=0.0):
    """Two caches of one layer of two heads, the second of which changes head 1 alone."""
    heads = [
        HeadDamage(cache, 1, head, head, kl, kl / 2, 0.25, 1 - dropped, dropped)
        for (cache, head), kl in zip((("a", 0), ("a", 1), ("b", 1)), kls, strict=True)
    ]
    return CacheDamage(tuple(heads), None, {"a": 8.5, "b": None})


def test_caches_share_a_scale_and_unchanged_layers_are_grey():
    left, right, bar = plot.caches(damage([0.25, 0.5, 2.0])).axes
    assert [ax.get_title() for ax in (left, right)] == ["a", "b"]
    assert left.images[0].get_array()[1].tolist() == [0.25, 0.5]
    assert right.images[0].get_array().mask.tolist() == [[True, True], [True, False]]
    assert {ax.images[0].norm.vmax for ax in (left, right)} == {2.0}
    assert bar.get_ylabel() == "KL(w || w'), nats"


def test_caches_that_drop_keys_have_the_finite_direction():
    left, _, bar = plot.caches(damage([math.inf, 0.5, 2.0], dropped=0.5)).axes
    assert bar.get_ylabel() == "KL(w' || w), nats" and left.images[0].get_array()[1, 1] == 0.25
    *_, bar = plot.caches(damage([1.0, 0.5, 2.0]), by="mass").axes
    assert bar.get_ylabel() == "mass"
    with pytest.raises(ch.BadValue, match="the measures kl"):
        plot.caches(damage([1.0, 0.5, 2.0]), by="loss")


@pytest.mark.parametrize("suffix", ["svg", "pdf"])
def test_a_figure_of_a_report_is_vectors(tmp_path, suffix):
    figure = plot.entropy_by_layer(findings()).figure
    data = plot.save(figure, tmp_path / f"figure.{suffix}").read_bytes()
    assert b"<image" not in data and b"/Subtype /Image" not in data and len(data) < 100_000
    assert plot.save(figure, tmp_path / f"again.{suffix}").read_bytes() == data


@pytest.mark.parametrize("free", [False, True], ids=["in a grid", "anywhere"])
@pytest.mark.parametrize("draw", [
    lambda ax: plot.heads(trace(), ax=ax), lambda ax: plot.steps(trace(), ax=ax),
    lambda ax: plot.model(findings(), ax=ax),
], ids=["heads", "steps", "model"])  # fmt: skip
def test_grids_replace_an_ax_and_return_it(draw, free, tmp_path):
    figure = Figure(figsize=(12, 6))
    ax = figure.add_axes((0.5, 0.1, 0.4, 0.8)) if free else figure.add_subplot(1, 2, 2)
    neighbour = figure.add_axes((0.1, 0.1, 0.3, 0.8)) if free else figure.add_subplot(1, 2, 1)
    assert draw(ax) is ax and not ax.axison and neighbour.axison
    [subfigure] = figure.subfigs
    assert subfigure.axes
    plot.save(ax, tmp_path / "whole.png")
    for drawn in subfigure.axes:
        assert drawn.get_window_extent().x0 >= 0.45 * figure.bbox.width


def test_an_ax_is_unchanged_if_nothing_can_be_drawn():
    ax = Figure().add_subplot()
    for draw in (plot.heads, plot.steps):
        with pytest.raises(ch.BadValue):
            draw(Trace((Step("other", "", "", "q k", torch.ones(2, 2)),)), ax=ax)
    assert ax.axison and not ax.figure.subfigs
