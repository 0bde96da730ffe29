"""Errors in three parts: what you gave, the rule, the way out."""


class AttentionError(Exception):
    """The base of every error clearhead raises on purpose.

    It is never raised itself: each one is a `BadValue` (also a `ValueError`) or
    a `BadType` (also a `TypeError`), so code that knows nothing of clearhead can
    catch it too. The three parts stay apart as `gave`, `rule` and `way_out`.
    """

    def __init__(self, gave: str, rule: str, way_out: str) -> None:
        self.gave, self.rule, self.way_out = gave, rule, way_out

    def __str__(self) -> str:
        return f"{self.gave}\n  Rule: {self.rule}\n  Way out: {self.way_out}"

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.gave, self.rule, self.way_out)


def kind_of(x: object) -> str:
    """What a value is, with its article: ``an int``, ``a list``, ``None``."""
    name = type(x).__name__
    return "None" if x is None else f"a{'n' * (name[0] in 'aeiouAEIOU')} {name}"


def why_failed(error: Exception) -> str:
    """What the system says of a file that failed, without its number; else the error itself."""
    return str(getattr(error, "strerror", None) or error)


class BadValue(AttentionError, ValueError):
    """A value, a shape or a size that the rule does not allow."""


class Missing(BadValue, ImportError):
    """A library that is asked for and not installed."""


class BadType(AttentionError, TypeError):
    """An argument of a kind (a type or a dtype) that the rule does not allow."""
