"""A text as words."""

import re
import unicodedata


def tokenize(text: str) -> list[str]:
    """Words and punctuation marks, as they stand: ``"It's late."`` -> It's, late, .

    Accents and vowel signs stay with their letter (composed where Unicode can, NFC), and what is
    joined to an emoji with it.
    """
    text = unicodedata.normalize("NFC", text)
    marks = "".join({c for c in text if unicodedata.category(c)[0] == "M"})
    glue = f"[{re.escape(marks)}\\u200d\\ufe0f\\U0001f3fb-\\U0001f3ff]"
    word = rf"(?:\w{glue}*)+"
    sign = rf"[^\w\s]{glue}*(?:(?<=\u200d)[^\w\s]{glue}*)*"
    return re.findall(rf"{word}(?:['\u2019]{word})*|{sign}", text)
