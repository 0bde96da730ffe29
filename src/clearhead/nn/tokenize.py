"""Split a text into words."""

import re
import unicodedata


def tokenize(text: str) -> list[str]:
    """Split a text into words and punctuation marks: ``"It's late."`` -> It's, late, .

    Accents and vowel signs remain with their letter (composed by NFC), joined parts of a word
    (Persian) with the word, and joined signs with their emoji. Chinese and Japanese, which have no
    spaces, are split into characters.
    """
    text = unicodedata.normalize("NFC", text)
    marks = "".join({c for c in text if unicodedata.category(c)[0] == "M"})
    glue = f"[{re.escape(marks)}\\u200c\\u200d\\ufe0f\\U0001f3fb-\\U0001f3ff]"
    flag = "[\U0001f1e6-\U0001f1ff]{2}"
    character = f"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]{glue}*"
    word = rf"(?:(?!{character})\w{glue}*)+"
    sign = rf"[^\w\s]{glue}*(?:(?<=\u200d)[^\w\s]{glue}*)*"
    return re.findall(rf"{flag}|{character}|{word}(?:['\u2019]{word})*|{sign}", text)
