"""Compare what code prints with what a page shows: numbers may be rounded otherwise."""

import re
from itertools import zip_longest

DIGITS = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")
NEGATIVE_ZERO = re.compile(r"-(?=0\.0+(?![\d.e]))")  # its sign is an error of rounding


def difference(text, shown):
    """Return the first two lines that differ in more than the last digits of decimals, or None."""
    text, shown = (NEGATIVE_ZERO.sub("", x) for x in (text, shown))
    for ours, theirs in zip_longest(text.split("\n"), shown.split("\n"), fillvalue=""):
        numbers = zip(DIGITS.findall(ours), DIGITS.findall(theirs), strict=False)
        same_words = re.split(DIGITS, ours) == re.split(DIGITS, theirs)
        if not same_words or not all(near(*pair) for pair in numbers):
            return ours, theirs
    return None


def near(number, other):
    """Whether decimals differ by two units of their last digit, or are both errors of rounding."""
    if number == other or ("." not in number + other and "e" not in number):
        return number == other
    digits, _, exponent = number.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    error = abs(float(number) - float(other))
    return error <= 2.1 * unit or max(float(number), float(other)) < 1e-5
