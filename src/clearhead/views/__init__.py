"""How results are shown: `text` in a terminal, `plot` by matplotlib, `html` as a page."""

from . import html as html, plot as plot, text as text
