"""The words of the generated pool: every one is a single token of a word-piece tokenizer."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES: tuple[str, ...] = _words("""
    amber apple badger barley beacon birch cactus candle cedar clover comet coral
    daisy dragon falcon ferry flint fossil garnet glacier harbor heron indigo ivory
    jasmine kayak lagoon lemon lotus magnet marble mango needle oasis onion orchid
    oyster pebble pigeon quartz raven saffron spruce tulip velvet walnut wombat zebra
    """)
"""Names of files and directories and the words in files, of every split.

None is part of another (a search for one never finds another) and none is a template or command
word. They are used in all splits: names are to be copied, not remembered.
"""

MODES = ("600", "700", "755")
HEAD_COUNTS = ("2", "3")

_TEMPLATE_WORDS = _words("""
    make directory create folder move into put in copy to duplicate as rename give the name
    delete remove write save append add at end of count lines line sort sorted without repeats
    unique keep with replace change set mode on first file find and its
    """)
_COMMAND_PIECES = _words("""
    mkdir mv cp rm rmdir touch echo wc l u i s cat ls grep rl
    sed chmod head done next err
""")
_NUMBERS = tuple(str(n) for n in range(10))
_PUNCTUATION = (".", '"', "-", "/", "<", ">", ">>", "\n")


def vocabulary() -> tuple[str, ...]:
    """Every piece that the pool's instructions, commands and observations are made of, sorted.

    Without the variants that begin with a space: a tokenizer that keeps a leading space in the
    piece needs both forms of every word, number and punctuation mark but the newline. A name has
    no space before it in `sed` commands and the quotes that ask for them, after a slash, and
    where an observation begins.
    """
    words = {*NAMES, *MODES, *_TEMPLATE_WORDS, *_COMMAND_PIECES, *_NUMBERS, *_PUNCTUATION}
    return tuple(sorted(words))
