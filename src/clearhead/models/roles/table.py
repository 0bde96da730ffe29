"""What heads do: the table of roles, which reports, the terminal and the page read.

A role that a report finds also needs its keys (`role_keys.py`). Other programs measure the roles of
`MEASURED`.
"""

from typing import Literal, TypedDict


class RoleText(TypedDict, total=False):
    """A role of a head, or the evenness of its weights.

    `label` is its name for people, and `short` that below a small map. `means` follows the number
    of a head, a fraction or the number of keys; `share` names the fraction of weight. `claim` is a
    sentence about a head whose query and key show the role. They do if the key is at the distance
    `offset`, if the token `copy` keys before it is a copy of the query, or as `shows` names it.
    """

    name: str
    label: str
    kind: Literal["measured", "role", "sink", "evenness"]
    short: str
    means: str
    share: str
    claim: str
    offset: int
    copy: int
    shows: Literal["pronoun", "earlier", "first"]


def _role(name: str, label: str, short: str, share: str, means: str, **more: object) -> RoleText:
    kind, means = more.pop("kind", "role"), f"of its weight {means}"
    row = dict(name=name, label=label, kind=kind, short=short, share=share, means=means, **more)
    return row  # type: ignore[return-value]  # the keys of RoleText


def _measured(label: str, short: str, means: str, **more: object) -> RoleText:
    row = dict(name=label, label=label, kind="measured", short=short, means=means, **more)
    return row  # type: ignore[return-value]  # the keys of RoleText


def _evenness(label: str, means: str, claim: str) -> RoleText:
    return RoleText(name=label, label=label, kind="evenness", short=label, means=means, claim=claim)


MEASURED = (  # on held-out stories
    _measured("antecedent", "antecedent", "of held-out pronouns look most at their antecedent",
              claim="This head finds the antecedent of a pronoun", shows="pronoun"),
    _measured("subject", "subject", "of held-out verbs look most at their subject",
              claim="This head finds the subject of a verb", shows="earlier"),
    _measured("previous word", "prev. word", "of held-out words look most at the word before",
              claim="This head looks at the word before", offset=-1),
)  # fmt: skip
# Heads that repeat, those that name a token, and the rest. Keys count neither the query itself nor
# the one before it as copies.
ROLES_OF_KEYS = (
    _role("induction", "induction", "induction", "after an earlier copy",
          "is on the token that followed an earlier copy, for tokens that occurred before",
          claim="This head finds what followed an earlier copy", copy=1),
    _role("duplicate", "duplicate token", "repeat", "earlier copy",
          "is on an earlier copy, for tokens that occurred before",
          claim="This head finds an earlier copy", copy=0),
    _role("previous", "previous token", "previous", "token before", "is on the token before",
          claim="This head looks at the token before", offset=-1),
    _role("before2", "two before", "two before", "two before", "is on the token two before",
          claim="This head looks two tokens before", offset=-2),
    _role("next", "next token", "next", "token after", "is on the token after",
          claim="This head looks at the token after", offset=1),
    _role("left", "patch to the left", "left", "patch to the left", "is on the patch to the left",
          claim="This head looks at the patch to the left", offset=-1),
    _role("right", "patch to the right", "right", "patch to the right",
          "is on the patch to the right", claim="This head looks at the patch to the right",
          offset=1),
    _role("above", "patch above", "above", "patch above", "is on the patch above",
          claim="This head looks at the patch above"),
    _role("below", "patch below", "below", "patch below", "is on the patch below",
          claim="This head looks at the patch below"),
    _role("same", "same token", "itself", "itself", "is on the token itself",
          claim="This head looks at the token itself", offset=0),
    _role("first", "first token (sink)", "first", "first token",
          "is on the first token, which takes weight that is not needed", kind="sink",
          claim="This head looks at the first token", shows="first"),
    _role("sinks", "later token (sink)", "later sink", "later sinks",
          "is on a later token that the model uses as a sink, too", kind="sink",
          claim="This head looks at a later token that serves as a sink"),
    _role("separators", "separators", "separators", "separators",
          "is on punctuation and line ends"),
    _role("special", "special token", "special", "special tokens", "is on special tokens"),
    _role("window", "local window", "local", "near by", "is on nearby tokens"),
    _role("near", "near patches", "near", "near by", "is on patches near by"),
    _role("sink", "nothing (sink logit)", "sink", "its sink",
          "goes to its sink, which has no value", kind="sink"),
)  # fmt: skip
# These describe a head without a role.
NO_ROLE = (
    _evenness("spread", "at a time, on average: its weights are nearly uniform",
              "its weights are nearly uniform"),
    _evenness("sharp", "at a time, on average: few tokens, which no role describes",
              "it looks at few tokens at a time"),
    _evenness("mixed", "at a time, on average", "it is between spread and sharp"),
    _evenness("NaN", "at a time, on average: its weights are NaN", "its weights are NaN"),
)  # fmt: skip
ROLES = (*MEASURED, *ROLES_OF_KEYS, *NO_ROLE)
LABELS = {role["name"]: role["label"] for role in ROLES_OF_KEYS}
RANK = {role["label"]: rank for rank, role in enumerate(ROLES)}
SINKS = tuple(role["name"] for role in ROLES_OF_KEYS if role["kind"] == "sink")
EVENNESS = tuple(role["label"] for role in NO_ROLE)
# The first distance outside of each window, on either side. They have one label.
WINDOWS = {f"window{n}": n for n in (8, 16, 32)}
OFFSETS = {"previous": -1, "before2": -2, "next": 1, "same": 0}
# Rows and columns from one patch of an image to another, and the first distance outside of a window
# of patches.
PLACES = {"left": (0, -1), "right": (0, 1), "above": (-1, 0), "below": (1, 0), "same": (0, 0)}
NEAR = {f"near{n}": n for n in (2, 3, 5)}
WINDOW_ROLES = dict.fromkeys(WINDOWS, "window") | dict.fromkeys(NEAR, "near")
REPEATS = tuple(role["name"] for role in ROLES_OF_KEYS if "copy" in role)
