"""The explorer on a local server: a page that the server's model recomputes.

`clearhead serve` starts it. A `Reader` runs a model on texts, and `server.app` responds to the
requests of the page, one model run at a time. The notebook's widget uses the same `Reader`.
"""

from .reader import Reader

__all__ = ["Reader"]
