"""What counts as one whole number."""

import operator

import torch


def whole(value: object) -> int | None:
    """`value` as an int if Python can count with it (an int, NumPy's, a tensor of one); else None.

    A boolean says yes or no, and is none.

    >>> whole(3), whole(3.0), whole(True)
    (3, None, None)
    """
    if type(value) is int:
        return value
    if isinstance(value, (bool, str, list, tuple)) or getattr(value, "dtype", None) == torch.bool:
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # it says what is none
    except TypeError:
        return None
