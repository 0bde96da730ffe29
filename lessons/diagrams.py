"""Draw the diagrams of the lessons, as SVG that a phone can show.

    python -m lessons.diagrams    # writes lessons/pictures/

A diagram is 340 units wide, and its smallest letters have 11.5. So on a phone, whose column has
about 330 pixels, they have 11 pixels or more. `_` in a word writes what follows as an index.
`tests/test_lessons.py` compares the files with what this program draws.
"""

import html
import json
import math
import re
from pathlib import Path

FOLDER = Path(__file__).parent
PICTURES = FOLDER / "pictures"
FORMING = FOLDER.parent / "examples" / "storyteller" / "forming.json"
SHOWN = re.compile(r"!\[([^]]+)\]\(pictures/([\w-]+)\.svg\)")  # in a lesson: title, name
WIDTH, ON_SCREEN = 340, 1.2  # units; pixels for each, where the column is wide enough
GAP = 20  # from a box to the next one
INK, BLUE, ORANGE = "ink", "blue", "orange"
STYLE = """.ink{color:#1c2024}.blue{color:#1f6f8b}.orange{color:#a84d1a}.paper{fill:#fcfbf8}
text{fill:currentColor}path{fill:none;stroke:currentColor;stroke-width:1.6}
.box{fill:currentColor;fill-opacity:.1;stroke:currentColor}.ink.box{fill-opacity:.03}
@media(prefers-color-scheme:dark){.ink{color:#e8e6e1}.blue{color:#7cc0d8}.orange{color:#eda274}
.paper{fill:#1c2024}}"""
Diagram = tuple[int, list[str]]  # its height in units, and its elements


def words(x: float, y: float, text: str, colour: str = INK, anchor: str = "middle") -> str:
    """Return words whose middle, `start` or `end` is at x, on the line y."""
    first, *others = re.split(r"_(\w+)", html.escape(text, quote=False))
    body = first
    for index, after in zip(others[::2], others[1::2], strict=True):
        body += f'<tspan dy="3" font-size="11.5">{index}</tspan>'
        body += f'<tspan dy="-3">{after}</tspan>' if after else ""
    return f'<text class="{colour}" x="{x}" y="{y}" text-anchor="{anchor}">{body}</text>'


def box(x: float, y: float, width: float, text: str, colour: str = INK) -> str:
    """Return a box with lines of words in its middle, which is at x; its upper edge is at y."""
    lines = text.split("\n")
    return "\n".join(
        [
            f'<rect class="box {colour}" x="{x - width / 2}" y="{y}" width="{width}" '
            f'height="{12 + 16 * len(lines)}" rx="4"/>',
            *(words(x, y + 19 + 16 * i, line, colour) for i, line in enumerate(lines)),
        ]
    )


def arrow(*points: float, colour: str = INK, curved: bool = False) -> str:
    """Return a line through points x, y, ... with a head at its end; curved by the second of 3."""
    *_, x0, y0, x, y = points
    angle = math.atan2(y - y0, x - x0)
    wings = [(x - 7 * math.cos(angle + a), y - 7 * math.sin(angle + a)) for a in (0.5, -0.5)]
    (x1, y1), (x2, y2) = wings
    steps = [f"{x} {y}" for x, y in zip(points[::2], points[1::2], strict=True)]
    line = f"M{steps[0]}Q{steps[1]} {steps[2]}" if curved else f"M{'L'.join(steps)}"
    return f'<path class="{colour}" d="{line}M{x1:.1f} {y1:.1f}L{x} {y}L{x2:.1f} {y2:.1f}"/>'


def chain(x: float, y: float, width: float, *steps: str | tuple[str, str]) -> str:
    """Return boxes below each other, with arrows between them. A step may have a colour."""
    parts = []
    for i, step in enumerate(steps):
        text, colour = (step, INK) if isinstance(step, str) else step
        parts += [arrow(x, y - GAP, x, y)] if i else []
        parts.append(box(x, y, width, text, colour))
        y += 12 + 16 * len(text.split("\n")) + GAP
    return "\n".join(parts)


def grid(
    x: float, y: float, rows: int, columns: int, cell: float = 11, colour: str = BLUE,
    marked: int | None = None, tall: float | None = None,
) -> str:  # fmt: skip
    """Return a matrix as cells, with one row in orange."""
    tall = tall or cell
    width, height = columns * cell, rows * tall
    lines = "".join(f"M{x} {y + i * tall}h{width}" for i in range(1, rows))
    lines += "".join(f"M{x + i * cell} {y}v{height}" for i in range(1, columns))
    parts = [f'<rect class="paper" x="{x}" y="{y}" width="{width}" height="{height}"/>']
    parts += [
        f'<rect class="box {colour}" x="{x}" y="{y}" width="{width}" height="{height}"/>',
        f'<path class="{colour}" style="stroke-width:.5" d="{lines}"/>',
    ]
    if marked is not None:
        at = f'x="{x}" y="{y + marked * tall}" width="{width}" height="{tall}"'
        parts.append(f'<rect class="box orange" style="fill-opacity:.6" {at}/>')
    return "\n".join(parts)


def lines(x: float, y: float, text: str, colour: str = INK, anchor: str = "start") -> str:
    """Return words on several lines, 16 units below each other."""
    return "\n".join(
        words(x, y + 16 * i, t, colour, anchor) for i, t in enumerate(text.split("\n"))
    )


def product(y: float, *matrices: tuple[str, str, float, int, int], text: int = 1) -> list[str]:
    """Return matrices (name, shape, x, rows, columns) with signs between them: a @ b = c.

    With two texts a second matrix is behind each; with one, a row is marked.
    """
    parts = []
    for i, (name, shape, x, rows, columns) in enumerate(matrices):
        top, middle = y + 26 + (6 - rows) * 6, x + columns * 6
        parts += [words(middle, y, name), words(middle, y + 16, shape)]
        parts += [grid(x + 6, top - 6, rows, columns, 12)] if text == 2 else []
        marked = 1 if text == 1 and i != 1 else None
        parts.append(grid(x, top, rows, columns, 12, marked=marked))
        parts += [words(x - 20, y + 68, "@=="[i - 1])] if i else []
    return parts


def path(first: str, second: str, last: str, colour: str) -> Diagram:
    """Return what two layers move from witch to She, and from She to often."""
    parts = [box(x, 8, 70, word) for x, word in ((60, "witch"), (170, "She"), (280, "often"))]
    parts += [arrow(x, 36, x, 176) for x in (60, 170, 280)]
    parts += [arrow(62, 60, 168, 92, colour=colour), arrow(172, 120, 278, 152, colour=BLUE)]
    parts += [lines(178, 80, first, colour), lines(162, 136, second, BLUE, "end")]
    return 212, [*parts, box(280, 176, 100, last, BLUE)]


def forming() -> Diagram:
    """Return how often three heads of the storyteller are right, along its training."""
    table = json.loads(FORMING.read_text("utf-8"))
    steps, (left, right), (top, bottom) = table["steps"], (56, 312), (16, 176)
    parts = []
    for share in (0, 50, 100):
        y = bottom - share / 100 * (bottom - top)
        parts.append(f'<path class="ink" style="stroke-width:.4" d="M{left} {y}H{right}"/>')
        parts.append(words(left - 6, y + 5, f"{share} %", anchor="end"))
    for step in range(0, steps[-1] + 1, 1000):
        x = left + step / steps[-1] * (right - left)
        parts.append(words(x, bottom + 20, f"{step:,}"))
    parts.append(words((left + right) / 2, bottom + 40, "step of the training"))
    colours = {"previous word": INK, "subject": BLUE, "antecedent": ORANGE}
    for row, (label, colour) in enumerate(colours.items()):
        rates = table["rates"][label]
        layer, head = max(
            ((i, j) for i, heads in enumerate(rates[-1]) for j in range(len(heads))),
            key=lambda place: rates[-1][place[0]][place[1]],
        )
        points = " ".join(
            f"{left + step / steps[-1] * (right - left):.1f} "
            f"{bottom - of[layer][head] * (bottom - top):.1f}"
            for step, of in zip(steps, rates, strict=True)
        )
        parts.append(f'<path class="{colour}" d="M{points}"/>')
        parts.append(
            words(left + 6, bottom + 66 + 20 * row, f"L{layer}H{head}: {label}", colour, "start")
        )
    return bottom + 120, parts


def each_way(x: float, y: float, end: float) -> str:
    """Return an arrow down for what is computed, and one up for its gradient."""
    return arrow(x - 5, y, x - 5, end, colour=BLUE) + arrow(x + 5, end, x + 5, y, colour=ORANGE)


STORY = "Once upon a time there".split()
# fmt: off
DIAGRAMS: dict[str, Diagram] = {
    "01-text-to-matrix": (274, [
            box(170, 8, 190, " ".join(STORY)), arrow(170, 36, 170, 64),
            words(180, 54, "cut into tokens", anchor="start"),
            *(chain(36 + 67 * i, 64, 60, token, (str(i), BLUE)) for i, token in enumerate(STORY)),
            arrow(170, 140, 170, 168), words(180, 158, "take rows of a table", anchor="start"),
            *(words(78, 189 + 18 * i, token, anchor="end") for i, token in enumerate(STORY)),
            grid(88, 176, 5, 4, 20, tall=18),
            lines(182, 206, "shape (T, d):\na row of d numbers\nfor every token"),
        ]),
    "02-one-query": (394, [
            box(170, 8, 90, "query", BLUE),
            *(arrow(170, 36, x, 64) for x in (60, 170, 280)),
            *(chain(60 + 110 * j, 64, 92, f"· key {j}", f"score {j}") for j in range(3)),
            *(arrow(x, 140, x, 160) for x in (60, 170, 280)),
            box(170, 160, 312, "softmax", ORANGE),
            *(arrow(x, 188, x, 208) for x in (60, 170, 280)),
            *(chain(60 + 110 * j, 208, 92, f"weight {j}", f"× value {j}") for j in range(3)),
            *(arrow(x, 284, x, 304) for x in (60, 170, 280)),
            box(170, 304, 312, "sum", ORANGE), arrow(170, 332, 170, 354),
            box(170, 354, 90, "output", BLUE),
        ]),
    "03-two-products": (322, [
            *product(18, ("X", "(6, 3)", 20, 6, 3), ("Xᵀ", "(3, 6)", 104, 3, 6),
                     ("S", "(6, 6)", 224, 6, 6)),
            words(38, 134, "queries"), words(140, 134, "keys"), words(260, 134, "query × key"),
            arrow(260, 142, 260, 160, 56, 160, 56, 178),
            words(158, 155, "softmax of each row", ORANGE),
            *product(196, ("weights", "(6, 6)", 20, 6, 6), ("X", "(6, 3)", 140, 6, 3),
                     ("Z", "(6, 3)", 224, 6, 3)),
            words(158, 312, "values"), words(242, 312, "outputs"),
        ]),
    "04-remedies": (340, [
            chain(80, 8, 80, "q", ("norm", ORANGE)), chain(200, 8, 80, "k", ("norm", ORANGE)),
            words(250, 75, "one remedy", ORANGE, "start"),
            arrow(80, 84, 120, 108), arrow(200, 84, 160, 108),
            chain(140, 108, 110, "q · k", "/ √d", ("soft cap", ORANGE), "softmax", "weights"),
            words(205, 223, "the other", ORANGE, "start"),
        ]),
    "05-three-matrices": (396, [
            box(170, 8, 60, "x", BLUE), *(arrow(170, 36, x, 64) for x in (60, 170, 280)),
            *(chain(x, 64, 90, f"W_{letter}", name) for x, letter, name in
              ((60, "q", "query"), (170, "k", "key"), (280, "v", "value"))),
            arrow(60, 140, 100, 164), arrow(170, 140, 130, 164),
            chain(115, 164, 120, "scores", "softmax", "weights"),
            arrow(115, 288, 115, 312), arrow(280, 140, 280, 312),
            box(198, 312, 240, "weighted sum of the values", ORANGE),
            arrow(198, 340, 198, 360), box(198, 360, 90, "output", BLUE),
        ]),
    "06-two-methods": (314, [
            words(88, 20, "first"), words(252, 20, "second"),
            chain(88, 30, 150, "scores", "softmax", "weights", ("× mask", ORANGE),
                  ("÷ sum of each row", ORANGE)),
            chain(252, 30, 150, "scores", ("forbidden scores\nbecome −∞", ORANGE), "softmax"),
            arrow(88, 250, 88, 276), arrow(252, 170, 252, 276),
            box(170, 276, 314, "the same weights", BLUE),
        ]),
    "07-dropout": (396, [
            chain(92, 8, 150, "scores", "mask", "softmax", "weights", ("dropout", ORANGE),
                  ("some 0,\nothers / (1 − p)", ORANGE), "× V", ("output", BLUE)),
            words(178, 171, "sum to 1", anchor="start"),
            words(178, 219, "in training only", ORANGE, "start"),
            words(178, 275, "sum to 1 on average", ORANGE, "start"),
        ]),
    "08-batch": (318, [
            *product(18, ("q", "(2, 5, 4)", 20, 5, 4),
                     ("k.transpose(1, 2)", "(2, 4, 5)", 120, 4, 5),
                     ("scores", "(2, 5, 5)", 230, 5, 5), text=2),
            arrow(260, 126, 260, 150, 56, 150, 56, 174),
            words(158, 145, "mask, softmax, dropout", ORANGE),
            *product(192, ("weights", "(2, 5, 5)", 20, 5, 5), ("v", "(2, 5, 4)", 132, 5, 4),
                     ("output", "(2, 5, 4)", 230, 5, 4), text=2),
            words(170, 310, "text 0 is in front, text 1 behind it"),
        ]),
    "08-heads": (200, [
            words(128, 20, "text 0"), words(258, 20, "text 1"),
            *(words(66, 58 + 70 * h, f"head {h}", (BLUE, ORANGE)[h], "end") for h in range(2)),
            *(grid(80 + 130 * b, 30 + 70 * h, 5, 8, 12, (BLUE, ORANGE)[h], tall=10)
              for b in range(2) for h in range(2)),
            words(193, 178, "a grid has T rows, D columns"),
        ]),
    "08-cut": (306, [
            words(170, 18, "X @ wide: (T, H · D)"),
            grid(74, 28, 5, 8, 12, tall=10), grid(170, 28, 5, 8, 12, ORANGE, tall=10),
            words(122, 93, "head 0", BLUE), words(218, 93, "head 1", ORANGE),
            arrow(170, 98, 170, 126), words(180, 117, "view: (T, H, D)", anchor="start"),
            *(grid(14 + 66 * t, 134 + 12 * h, 1, 8, 6, (BLUE, ORANGE)[h], tall=10)
              for t in range(5) for h in range(2)),
            *(words(38 + 66 * t, 174, f"token {t}") for t in range(5)),
            arrow(170, 182, 170, 210), words(180, 201, "transpose: (H, T, D)", anchor="start"),
            grid(50, 218, 5, 8, 12, tall=10), grid(194, 218, 5, 8, 12, ORANGE, tall=10),
            words(98, 288, "head 0: T rows", BLUE), words(242, 288, "head 1: T rows", ORANGE),
        ]),
    "09-three-methods": (374, [
            *(words(x, 20, name) for x, name in
              ((58, "added sines"), (170, "rotation"), (282, "bias"))),
            *(chain(x, 30, 104, first, "W_q, W_k, W_v", "q, k, v") for x, first in
              ((58, ("x + P_p", ORANGE)), (170, "x"), (282, "x"))),
            arrow(58, 154, 58, 222), arrow(282, 154, 282, 222), arrow(170, 154, 170, 174),
            chain(170, 174, 104, ("rotate q, k", ORANGE), "scores"),
            box(58, 222, 104, "scores"),
            chain(282, 222, 104, "scores", ("+ bias of\ndistance", ORANGE), "softmax"),
            arrow(58, 250, 58, 334), arrow(170, 250, 170, 334),
            box(58, 334, 104, "softmax"), box(170, 334, 104, "softmax"),
        ]),
    "10-block": (404, [
            box(62, 8, 60, "x", BLUE), arrow(62, 36, 62, 170), arrow(62, 194, 62, 328),
            *(part for y, norm, step in (
                (52, "norm_1", "attention"), (210, "norm_2", "feed-forward")) for part in (
                arrow(62, y, 220, y, 220, y + 12), chain(220, y + 12, 130, norm, (step, ORANGE)),
                arrow(220, y + 88, 220, y + 130, 76, y + 130),
                words(70, y + 60, "residual", BLUE, "start"),
                f'<circle class="box ink" cx="62" cy="{y + 130}" r="12"/>', words(62, y + 135, "+"),
              )),
            arrow(62, 352, 62, 372), box(92, 372, 160, "x of the next block", BLUE),
        ]),
    "11-tiles": (236, [
            words(206, 18, "keys and values, a tile at a time"),
            *(words(118 + 88 * i, 36, f"k[{4 * i}:{4 * i + 4}]", BLUE) for i in range(3)),
            lines(38, 62, "queries\nq[0:4]", BLUE, "middle"),
            *(grid(96 + 88 * i, 44, 4, 4, 11) for i in range(3)),
            *(words(118 + 88 * i, 104, "scores") for i in range(3)),
            *(arrow(118 + 88 * i, 110, 118 + 88 * i, 132) for i in range(3)),
            box(38, 132, 68, "m, total,\nmixed"), arrow(72, 154, 86, 154),
            *(box(118 + 88 * i, 132, 64, "shrink,\nadd", ORANGE) for i in range(3)),
            arrow(150, 154, 174, 154), arrow(238, 154, 262, 154),
            arrow(294, 176, 294, 200), box(218, 200, 232, "mixed / total = output of q[0:4]", BLUE),
        ]),
    "11-memory": (220, [
            box(170, 8, 320,
                "processor\nits caches hold one tile:\nscores, weights, m, total, mixed", BLUE),
            arrow(150, 68, 150, 110), arrow(190, 110, 190, 68),
            words(204, 94, "numbers move", anchor="start"),
            box(170, 110, 320, "main memory\nq, k, v and the output"),
            box(170, 162, 320, "with the matrix also\nall scores and weights", ORANGE),
        ]),
    "11-backward": (300, [
            words(170, 20, "forward, in tiles"), box(60, 30, 84, "q, k, v"),
            arrow(102, 44, 190, 44), box(246, 30, 112, "output, lse", BLUE),
            words(170, 80, "all five are stored"),
            words(170, 110, "backward, in each tile"),
            chain(84, 120, 152, "q, k", "scores", ("W = e^(score − lse)", ORANGE),
                  ("adds to dV", BLUE)),
            chain(258, 120, 152, "dO, v", "dW", ("dS = W (dW − δ)", ORANGE),
                  ("adds to dQ and dK", BLUE)),
            arrow(160, 230, 182, 230, colour=ORANGE),
        ]),
    "12-cache": (262, [
            words(24, 20, "step"), words(76, 20, "query"), words(224, 20, "keys and values"),
            *(part for t in range(1, 5) for part in (
                words(24, 5 + 44 * t, str(t)), box(76, 44 * t - 14, 40, f"q_{t}", ORANGE),
                arrow(96, 44 * t, 110, 44 * t),
                *(box(84 + 55 * i, 44 * t - 14, 50, f"k_{i}, v_{i}", ORANGE if i == t else BLUE)
                  for i in range(1, t + 1)))),
            words(170, 226, "read from the cache", BLUE),
            words(170, 248, "new, then added to the cache", ORANGE),
        ]),
    "13-gradient": (336, [
            box(170, 8, 60, "x"), arrow(170, 36, 90, 62, colour=BLUE),
            arrow(170, 36, 250, 62, colour=BLUE),
            box(90, 62, 120, "W_q, W_k"), box(250, 62, 120, "W_v"), each_way(90, 90, 114),
            box(90, 114, 120, "scores"), each_way(90, 142, 166), box(90, 166, 120, "weights"),
            each_way(250, 90, 166), box(250, 166, 120, "values"),
            each_way(90, 194, 218), each_way(250, 194, 218), box(170, 218, 280, "output"),
            each_way(170, 246, 270), box(170, 270, 100, "loss"),
            words(90, 324, "forward", BLUE), words(230, 324, "backward: gradients", ORANGE),
        ]),
    "13-forming": forming(),
    "14-edge": path("layer 0, cut:\nheads 0, 3, 7", "layer 1", "next word", ORANGE),
    "15-sink": (196, [
            words(12, 22, "weight of the query", anchor="start"),
            words(12, 112, "length of the value", anchor="start"),
            *(part for y, name, size, number, colour in (
                (34, "[CLS]", 70, "0.35", ORANGE), (60, "others", 130, "the rest", BLUE),
                (124, "[CLS]", 3, "0.08", ORANGE), (150, "others", 200, "4.87", BLUE))
              for part in (
                words(12, y + 14, name, colour, "start"),
                f'<rect class="box {colour}" style="fill-opacity:.8" x="70" y="{y}" width="{size}" '
                'height="18"/>', words(78 + size, y + 14, number, colour, "start"))),
        ]),
    "16-ring": (236, [
            *(words(90 + 68 * r, 20, f"rank {r}") for r in range(4)),
            *(part for s in range(4) for part in (
                words(30, 49 + 44 * s, f"step {s}"),
                *(box(90 + 68 * r, 30 + 44 * s, 54, f"keys {(r - s) % 4}",
                      INK if r != s else ORANGE) for r in range(4)),
                *(arrow(117 + 68 * r, 44 + 44 * s, 131 + 68 * r, 44 + 44 * s)
                  for r in range(4) if s < 3))),
            words(170, 222, "the arrow from rank 3 leads to rank 0"),
        ]),
    "16-layouts": (150, [
            words(10, 20, "contiguous", anchor="start"), words(10, 84, "head-tail", anchor="start"),
            *(box(50 + 80 * r, 28, 80, f"rank {r}", ORANGE if r == 0 else INK) for r in range(4)),
            *(box(30 + 40 * i, 92, 40, str(min(i, 7 - i)), ORANGE if i in (0, 7) else INK)
              for i in range(8)),
            words(10, 142, "first position", BLUE, "start"), words(330, 142, "last", BLUE, "end"),
        ]),
    "17-three-factors": (212, [
            *(part for x, name, factor, why in (
                (60, "weight", "w_ij", "where it looks"), (168, "value", "v_j", "what is there"),
                (278, "projection", "W_O", "how it is written")) for part in (
                words(x, 20, name), box(x, 30, 70, factor, ORANGE), words(x, 76, why))),
            words(114, 49, "×"), words(223, 49, "×"), arrow(168, 84, 168, 106),
            box(170, 106, 316, "what the head carries from key j to query i"),
            arrow(168, 134, 168, 160), box(170, 160, 200, "the stream of query i", BLUE),
        ]),
    "17-path": path("layer 0:\nheads 0, 3, 7", "layer 1:\nheads 0, 1, 7", "flew", BLUE),
    "18-induction": (204, [
            lines(136, 20, "layer 0: sat looks at the word\nbefore, and writes it in its stream",
                  ORANGE, "middle"),
            arrow(170, 72, 136, 34, 104, 72, colour=ORANGE, curved=True),
            *(box(34 + 68 * i, 74, 60, word, BLUE if i == 4 else INK)
              for i, word in enumerate("start cat sat hat cat".split())),
            *(words(34 + 68 * i, 120, str(i)) for i in range(5)),
            arrow(306, 126, 238, 164, 172, 126, colour=BLUE, curved=True),
            lines(228, 168, "layer 1: cat looks for a word\nwith cat before it", BLUE, "middle"),
        ]),
    "19-patches": (204, [
            words(66, 20, "image"), grid(12, 30, 3, 3, 36, ORANGE),
            *(words(30 + 36 * (i % 3), 53 + 36 * (i // 3), str(i)) for i in range(9)),
            arrow(126, 84, 166, 84), words(146, 74, "cut"),
            words(250, 20, "tokens"), grid(178, 30, 9, 8, 12, BLUE, marked=4),
            *(words(172, 41 + 12 * i, "_" + str(i), anchor="end") for i in range(9)),
            lines(280, 84, "row 4 is\npatch 4", ORANGE),
            lines(170, 172, "token 3 r + c is the patch\nin row r and column c", anchor="middle"),
        ]),
}
# fmt: on


def titles() -> dict[str, str]:
    """Return what is seen in each diagram, as the lesson that shows it states."""
    lessons = "".join(path.read_text("utf-8") for path in sorted(FOLDER.glob("[0-9][0-9]-*.md")))
    return {name: " ".join(title.split()) for title, name in SHOWN.findall(lessons)}


def svg(title: str, height: int, parts: list[str]) -> str:
    """Return a diagram as the text of a file."""
    on_screen = f'width="{ON_SCREEN * WIDTH:.0f}" height="{ON_SCREEN * height:.0f}"'
    elements = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {on_screen} '
        'role="img" font-family="sans-serif" font-size="14">\n'
        f"<title>{html.escape(title, quote=False)}</title>\n<style>{STYLE}</style>\n"
        f'<rect class="paper" width="100%" height="100%" rx="6"/>\n{elements}\n</svg>\n'
    )


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, title in titles().items():
        (PICTURES / f"{name}.svg").write_text(svg(title, *DIAGRAMS[name]), "utf-8")


if __name__ == "__main__":
    main()
