"""The explorer on a local server: a page that a model behind it computes anew.

`clearhead serve` starts it. A `Reader` reads text with a model, again and again; `server.app`
answers the page's requests about it, one model run at a time. The widget of the notebook uses the
same `Reader`.
"""

from .reader import Reader

__all__ = ["Reader"]
