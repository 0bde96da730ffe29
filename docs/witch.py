"""The first picture of the README: what one edge of attention is worth.

python -m docs.witch    # runs the included model, and writes docs/pictures/witch.svg
"""

from pathlib import Path

import torch

import clearhead as ch
from clearhead import demo

PICTURE = Path(__file__).parent / "pictures" / "witch.svg"
STORY = "Long ago there was a quiet witch and a young king. She often"
DEEDS = ("flew", "cooked", "conjured")  # what witches do in the stories of the model
LAYER, HEAD = 0, 7
LETTER = 9  # the width of a letter, in units of the picture
BLACK, BEFORE, AFTER = "#1c2024", "#1f6f8b", "#c8693a"


def measure() -> tuple[list[str], int, int, float, list[tuple[str, float, float]]]:
    """Return tokens, query, key, the weight of the edge, and each word with its two chances."""
    storyteller = demo.load()
    text = storyteller.encode(STORY)
    tokens, ids = list(text.tokens), torch.tensor([text.ids])
    query, key = tokens.index("She"), tokens.index("witch")
    only_key = ch.prefix(key + 1) & ~ch.prefix(key)
    cut = ch.edits.knock_out(only_key, layers=[LAYER], heads=[HEAD], positions=[query])
    with torch.no_grad():
        before = storyteller.model(ids)[0, -1].softmax(-1)
        with ch.intervene(storyteller.model, [cut]):
            after = storyteller.model(ids)[0, -1].softmax(-1)
    weight = storyteller.explain(STORY, LAYER)["weights"][HEAD, query, key].item()
    at = [storyteller.vocabulary.words.index(deed) for deed in DEEDS]
    pairs = torch.stack([before[at], after[at]], dim=1)
    rows = [*DEEDS, "together"], [*pairs.tolist(), pairs.sum(0).tolist()]
    return (
        tokens,
        query,
        key,
        weight,
        [(word, *chances) for word, chances in zip(*rows, strict=True)],
    )


def text(x: int, y: int, colour: str, words: object, more: str = "") -> str:
    """Return an element of SVG with these words."""
    return f'<text x="{x}" y="{y}" fill="{colour}"{more}>{words}</text>'


def line(path: str) -> str:
    """Return a line of SVG."""
    return f'<path d="{path}" fill="none" stroke="{BEFORE}" stroke-width="3"/>'


def draw() -> str:
    """Return the picture as SVG: the sentence with its edge, and the next word as pairs of bars."""
    tokens, query, key, weight, chances = measure()
    parts, at, middles = [], 24, []
    for i, token in enumerate([*tokens, "____"]):
        colour = BEFORE if i in (query, key) else AFTER if i == len(tokens) else BLACK
        parts.append(text(at, 110, colour, token))
        middles.append(at + LETTER * len(token) // 2)
        at += LETTER * (len(token) + 1)
    start, end = middles[query], middles[key]
    top = (start + end) // 2
    label = f"head {HEAD} of layer {LAYER}: weight {weight:.3f}"
    parts += [
        line(f"M{start} 92 Q{top} 20 {end} 92"),
        line(f"M{end - 6} 82 L{end} 94 L{end + 9} 84"),
        text(top, 34, BEFORE, label, ' text-anchor="middle"'),
        text(24, 158, BLACK, "the next word, in percent:"),
        text(300, 158, BEFORE, "as trained"),
        text(420, 158, AFTER, "without this one edge"),
    ]
    for row, (word, *both) in enumerate(chances):
        y = 176 + 44 * row
        parts.append(text(24, y + 20, BLACK, word))
        for top, value, colour in zip((y, y + 17), both, (BEFORE, AFTER), strict=True):
            width = round(1650 * value)
            parts.append(f'<rect x="120" y="{top}" width="{width}" height="14" fill="{colour}"/>')
            parts.append(text(128 + width, top + 12, colour, f"{100 * value:.0f}"))
    body = "\n".join(parts)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 352" '
        'font-family="monospace" font-size="15">\n'
        f'<rect width="680" height="352" fill="#fcfbf8"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), "utf-8")
