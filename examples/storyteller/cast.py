"""The characters of the stories, with pronouns, homes, things, deeds and moods.

Things, deeds and moods differ between characters. So, to predict the word after "she" or "her", a
model has to look back at the antecedent of the pronoun.
"""

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Pronouns:
    """The forms of a pronoun: she took her kite, she was tired, the owl saw her."""

    subject: str
    object: str
    owner: str
    was: str = "was"


PRONOUNS = {
    "she": Pronouns("she", "her", "her"),
    "he": Pronouns("he", "him", "his"),
    "it": Pronouns("it", "it", "its"),
    "they": Pronouns("they", "them", "their", "were"),
}


@dataclass(frozen=True)
class Character:
    noun: str
    pronoun: str
    home: tuple[str, ...]
    things: tuple[str, ...]
    deeds: tuple[str, ...]
    moods: tuple[str, ...]

    @property
    def forms(self) -> Pronouns:
        return PRONOUNS[self.pronoun]


# noun: home: things: deeds: moods
_TABLE = {
    "she": """
        girl: on the hill: kites dolls: sang skipped climbed: curious happy
        queen: in the castle: crowns mirrors: frowned danced wept: proud rich
        mother: in the kitchen: aprons spoons: cooked baked hummed: busy kind
        grandmother: by the fire: needles shawls: sewed snored baked: old wise
        aunt: in the garden: baskets roses: dug painted hummed: gentle kind
        princess: in the tower: ribbons necklaces: danced painted wept: lonely lovely
        witch: in the swamp: brooms potions: cooked flew conjured: wicked angry
    """,
    "he": """
        boy: on the beach: boats shells: skipped climbed swam: brave happy
        king: on the throne: rings robes: frowned shouted snored: proud rich
        father: in the barn: hammers ladders: dug worked whistled: busy strong
        grandfather: under the oak: pipes sticks: fished snored whistled: old tired
        uncle: in the village: carts bells: hummed shouted painted: merry loud
        prince: on the bridge: swords shields: danced fought hunted: brave lovely
        wizard: in the cave: wands books: flew conjured worked: wise lonely
    """,
    "it": """
        cat: on the mat: balls cushions: crept jumped hunted: tired lazy
        dog: by the gate: bones collars: jumped dug growled: hungry loyal
        bird: in the nest: feathers worms: sang flew whistled: cheerful light
        fox: in the forest: hens eggs: crept hunted growled: clever sly
        horse: in the field: saddles carrots: jumped ran sneezed: strong fast
        mouse: under the floor: cheese crumbs: crept ran sneezed: afraid tiny
        bear: by the river: honey fish: fished growled snored: hungry huge
    """,
    "they": """
        children: in the school: toys games: skipped laughed ran: curious cheerful
        sailors: on the ship: ropes maps: hummed swam rowed: merry bold
        farmers: on the farm: ploughs seeds: worked dug hummed: tired strong
        soldiers: at the fort: drums boots: marched fought shouted: loyal bold
        twins: in the attic: puppets masks: laughed jumped sneezed: sly loud
        miners: in the mountain: lamps picks: dug worked marched: dusty rich
        bees: in the meadow: wings hives: hummed flew danced: light fast
    """,
}

CHARACTERS = tuple(
    Character(noun, pronoun, *(tuple(part.split()) for part in rest))
    for pronoun, lines in _TABLE.items()
    for noun, *rest in (line.strip().split(": ") for line in lines.strip().splitlines())
)

LOOKS = "little young tall small quiet funny strange famous friendly poor".split()
COLOURS = "red blue green golden silver white black yellow".split()
TAKES = "took lost found carried hid dropped wanted loved washed forgot kept brought".split()
STAYS = "sat slept waited rested stayed stood lived stopped".split()
GIVES = "gave showed lent sold offered promised".split()
HOWS = "quickly slowly quietly again always often gladly soon".split()
WHENS = "all day:every morning:at night:for hours:until noon".split(":")
STARTS = "one day,:then:later,:in the evening,:suddenly".split(":")
NEARS = "near beside behind".split()
SCENERY = "well stone lantern gate tree bench fountain hedge".split()
OPENINGS = "once upon a time:long ago:many years ago".split(":")


@lru_cache(maxsize=1)
def verbs() -> frozenset[str]:
    deeds = {verb for who in CHARACTERS for verb in (*who.deeds, who.forms.was)}
    return frozenset({*TAKES, *STAYS, *GIVES, *deeds})


@lru_cache(maxsize=1)
def pronouns() -> frozenset[str]:
    forms = [who.forms for who in CHARACTERS]
    return frozenset(word for f in forms for word in (f.subject, f.object, f.owner))
