"""Generate short English stories from a seed, with subjects of verbs and antecedents of pronouns.

A pronoun refers to the latest noun that agrees with it. "She" agrees with "girl" and not with
"king", so gender and number decide first, and distance second. Other nouns are between them, so a
fixed distance is rarely right.

The verb of "there was a girl" is before its subject, where a causal model cannot look at it, and is
not counted.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Literal
from zlib import crc32

from clearhead.core.errors import BadValue

from .cast import (
    CHARACTERS,
    COLOURS,
    GIVES,
    HOWS,
    LOOKS,
    NEARS,
    OPENINGS,
    SCENERY,
    STARTS,
    STAYS,
    TAKES,
    WHENS,
    Character,
)

Split = Literal["train", "held-out"]
# The words of a rhyme on a beat without a word of its voice: short words, and full stops about as
# often as in stories.
RESTS = ". . . , a two the and to was were there".split()
BEATS = 9  # the beats of a rhyme
LONGEST = 116  # words; the few longer stories are dropped, because they would lengthen a batch
HELD_OUT_ONE_IN = 10  # one in 10 possible stories is held out


@dataclass(frozen=True)
class Story:
    """A story as words in lower case, with separate punctuation.

    `subjects` maps verbs to their subjects, and `antecedents` pronouns to the nouns to which they
    refer, as indices of words.
    """

    words: tuple[str, ...]
    subjects: dict[int, int]
    antecedents: dict[int, int]

    def __str__(self) -> str:
        return " ".join(self.words).replace(" .", ".").replace(" ,", ",")


def story(seed: int, number: int, split: Split = "train") -> Story:
    """Return story `number` of a seed. Equal arguments return equal stories.

    Held-out stories never occur in training, for any seeds: a checksum of the words decides the
    split of a story, and stories are drawn until one belongs to `split`.
    """
    if split not in ("train", "held-out"):
        raise BadValue(
            f"split is {split!r}.",
            "a story is for training or held out.",
            "pass split='train' or split='held-out'.",
        )
    random = Random(f"{split} {seed} {number}")
    while True:
        drawn = _tell(random)
        if len(drawn.words) <= LONGEST and split_of(drawn.words) == split:
            return drawn


def split_of(words: tuple[str, ...]) -> Split:
    """Return the split of a story with these words."""
    return "train" if crc32(" ".join(words).encode()) % HELD_OUT_ONE_IN else "held-out"


@lru_cache(maxsize=1)
def lexicon() -> tuple[str, ...]:
    """Return all words that a story can contain, in alphabetical order."""
    words = set("there was were lived a two rhyme to and the that because . ,".split())
    for group in (LOOKS, COLOURS, TAKES, STAYS, GIVES, HOWS, NEARS, SCENERY):
        words |= set(group)
    for phrase in (*WHENS, *STARTS, *OPENINGS):
        words |= set(phrase.replace(",", " ,").split())
    for who in CHARACTERS:
        words |= {who.noun, *who.home, *who.things, *who.deeds, *who.moods}
        words |= {who.forms.subject, who.forms.object, who.forms.owner}
    return tuple(sorted(words))


@lru_cache(maxsize=1)
def rounds() -> tuple[str, ...]:
    """Return the source of all rhymes: every word once, in a random order."""
    words = [word for word in lexicon() if word not in (*RESTS, "rhyme")]
    return tuple(Random("round").sample(words, len(words)))


@dataclass
class _Role:
    """A character in this story: its looks, the colour of its things, and its deeds."""

    who: Character
    look: str
    colour: str
    deeds: list[str]  # those that the story has not used yet


@dataclass
class _Teller:
    """The words so far, with their subjects and antecedents."""

    random: Random
    words: list[str] = field(default_factory=list)
    subjects: dict[int, int] = field(default_factory=dict)
    antecedents: dict[int, int] = field(default_factory=dict)
    latest: dict[str, tuple[_Role, int]] = field(default_factory=dict)  # by pronoun

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def say(self, *phrases: str) -> int:
        """Add these words, and return the index of the last."""
        for phrase in phrases:
            self.words += phrase.replace(",", " ,").split()
        return len(self.words) - 1

    def noun(self, role: _Role) -> int:
        index = self.say(role.who.noun)
        self.latest[role.who.pronoun] = (role, index)
        return index

    def the(self, role: _Role) -> int:
        self.say("the", *([role.look] if self.chance(0.35) else []))
        return self.noun(role)

    def pronoun(self, role: _Role, form: str) -> int:
        meant, noun = self.latest[role.who.pronoun]
        assert meant is role, "a pronoun refers to the latest noun that agrees with it"
        index = self.say(form)
        self.antecedents[index] = noun
        return index

    def verb(self, verb: str, subject: int) -> None:
        self.subjects[self.say(verb)] = subject

    def is_latest(self, role: _Role) -> bool:
        return self.latest[role.who.pronoun][0] is role

    def introduce(self, role: _Role) -> int:
        self.say("two" if role.who.pronoun == "they" else "a", role.look)
        return self.noun(role)

    # ------------------------------------------------------------------ the parts of a sentence

    def subject(self, role: _Role, cast: list[_Role]) -> int:
        """Add "she", or the noun, and the words before its verb. Return its index."""
        if self.is_latest(role) and self.chance(0.6):
            index = self.pronoun(role, role.who.forms.subject)
        else:
            index = self.the(role)
            for _ in range(self.random.choice((0, 1, 1))):
                self.aside(role, cast)
        self.how()
        return index

    def how(self) -> None:
        """Add adverbs (slowly; slowly and again), so that not every verb follows its subject."""
        first, second = self.random.sample(HOWS, 2)
        self.say(*self.random.choice(((), (), (first,), (first, "and", second))))

    def aside(self, role: _Role, cast: list[_Role]) -> None:
        """Add a place with another noun: near that queen.

        Its pronoun differs from that of the subject, because "the girl near that queen took her
        kites" would be ambiguous.
        """
        self.say(self.random.choice(NEARS), "that")
        others = [r for r in cast if r.who.pronoun != role.who.pronoun]
        if others and self.chance(0.5):
            self.noun(self.random.choice(others))
        else:
            self.say(self.random.choice(SCENERY))

    def things(self, role: _Role, owned: bool = True) -> None:
        """Add things of the character, of one or two kinds: her red kites and dolls, or kites."""
        if owned:
            self.pronoun(role, role.who.forms.owner)
        if self.chance(0.4):
            self.say(role.colour)
        first, second = self.random.sample(role.who.things, 2)
        self.say(first, *(["and", second] if self.chance(0.3) else []))

    # ---------------------------------------------------------------------------- the sentences

    def takes(self, role: _Role, cast: list[_Role]) -> None:
        """Take things, which may belong to another character: the girl found his wand."""
        self.verb(self.random.choice(TAKES), self.subject(role, cast))
        others = [r for r in cast if r.who.pronoun != role.who.pronoun and self.is_latest(r)]
        if others and self.chance(0.15):
            self.things(self.random.choice(others))
        else:
            self.things(role, owned=self.chance(0.6))

    def stays(self, role: _Role, cast: list[_Role]) -> None:
        self.verb(self.random.choice(STAYS), self.subject(role, cast))
        self.say(*role.who.home)
        if self.chance(0.35):
            self.say("because")
            forms = role.who.forms
            self.verb(forms.was, self.pronoun(role, forms.subject))
            first, second = self.random.sample(role.who.moods, 2)
            self.say(first, *(["and", second] if self.chance(0.3) else []))

    def gives(self, role: _Role, cast: list[_Role]) -> None:
        """Give things to a character with another pronoun, perhaps at its home."""
        self.verb(self.random.choice(GIVES), self.subject(role, cast))
        self.things(role, owned=self.chance(0.6))
        self.say("to")
        other = self.random.choice([r for r in cast if r.who.pronoun != role.who.pronoun])
        if self.is_latest(other) and self.chance(0.6):
            self.pronoun(other, other.who.forms.object)
        else:
            self.the(other)
        if self.chance(0.7):
            self.say(*other.who.home)

    def does(self, role: _Role, cast: list[_Role]) -> None:
        """Add a deed whose subject is a pronoun, so the next word depends on its antecedent."""
        subject = self.pronoun(role, role.who.forms.subject)
        self.how()
        self.verb(role.deeds.pop(), subject)
        if role.deeds and self.chance(0.25):
            self.say("and")
            self.verb(role.deeds.pop(), subject)
        self.say(*role.who.home)
        if self.chance(0.1):
            self.say(self.random.choice(WHENS))

    def rhyme(self) -> None:
        """Add a rhyme before or after the story: two voices alternate, each with its own part.

        The next word depends only on the word before the last, so a model has to look at that
        word. Verbs and pronouns of a rhyme have no subjects and antecedents.
        """
        self.say("a rhyme .")
        high, low = self.random.sample(range(len(rounds())), 2)
        for beat in range(BEATS):
            for voice in (high, low):
                word = rounds()[(voice + beat) % len(rounds())]
                self.words.append(self.random.choice(RESTS) if self.chance(0.2) else word)
        self.say(".")


def _tell(random: Random) -> Story:
    """Write a rhyme and a story, in either order, short or long.

    So neither position nor length shows whether a word belongs to a rhyme. To know the word before
    the last in rhymes, a model has to look at the previous word everywhere.
    """
    teller = _Teller(random)
    rhyme_first = teller.chance(0.5)
    if rhyme_first:
        teller.rhyme()
    looks = random.sample(LOOKS, 3)
    cast = [
        _Role(who, look, random.choice(COLOURS), random.sample(who.deeds, len(who.deeds)))
        for who, look in zip(_cast(random), looks, strict=True)
    ]
    here, late = cast[:2], cast[2]
    teller.say(random.choice(OPENINGS), "there")
    teller.say("lived" if teller.chance(0.4) else here[0].who.forms.was)
    teller.introduce(here[0])
    teller.say("and")
    teller.introduce(here[1])
    teller.say(".")
    enters = random.randint(1, 3)
    for number in range(random.randint(2, 6)):
        if number == enters:
            teller.say("one day ,")
            teller.verb(random.choice(TAKES), teller.introduce(late))
            teller.things(late, owned=teller.chance(0.6))
            teller.say(".")
            here = cast
        elif teller.chance(0.15):
            teller.say(random.choice(STARTS))
        role = random.choice(here)
        kinds = [teller.takes, teller.stays, teller.gives]
        if role.deeds and teller.is_latest(role):
            kinds += [teller.does] * 4
        random.choice(kinds)(role, here)
        teller.say(".")
    if not rhyme_first:
        teller.rhyme()
    return Story(tuple(teller.words), teller.subjects, teller.antecedents)


def _cast(random: Random) -> list[Character]:
    """Draw three different characters.

    The first two have different pronouns. The third appears later and mostly has one of these, so
    a pronoun changes its antecedent.
    """
    while True:
        first, second, third = random.sample(CHARACTERS, 3)
        if first.pronoun == second.pronoun:
            continue
        if third.pronoun in (first.pronoun, second.pronoun) or random.random() < 0.3:
            return [first, second, third]
