"""The words of the catalogue: names of files and directories, and what stands in them."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


WORDS = _words(
    """
    acorn agate alder almond alpaca anchor antler anvil apron arbor aspen aster atlas
    auburn autumn avocet awning badge bagel bamboo banjo banner barge barrel basil basin basket
    bazaar beaker beetle bellows bishop bison blanket blossom bobcat bonnet boulder bramble
    brandy bridle bronze brook bucket buckle buffalo bugle burrow butler button cabin cable camel
    canary candy canoe canyon carbon cargo carpet carrot carton castle cavern cellar cement chalk
    cherry chimney cider cinder circus citron cobalt cobra cocoa coffee collar compass condor
    copper cotton cougar cradle crater cricket crimson crocus crystal cuckoo cupola curlew curtain
    cypress daffodil dapple denim desert dinghy dolphin donkey drawer drizzle ebony eclipse elbow
    elder ember emerald engine envoy ermine estuary fabric falcon fathom feather fennel fiddle
    fiesta finch fjord flannel fleece flute forest fountain fresco galaxy galley gannet garden
    garlic gazelle geyser ginger giraffe goblet gopher gorge granite gravel grotto guitar gully
    hamlet hammer harvest hazel heather hermit hickory hollow honey hornet husky hydrant iceberg
    iguana inlet island jackal jaguar jersey jigsaw jungle juniper kelp kernel kettle kiosk kitten
    ladder lantern lapis larder laurel lavender ledger leopard lettuce lichen lilac linen lizard
    lobster locket lumber lupin lynx mackerel magpie mallet mango mantle maple marlin marsh meadow
    melon merlin mimosa minnow mirror mitten monsoon mortar mosaic mulberry muslin mustard nectar
    nettle nickel nutmeg oboe ocean olive opal orbit otter oxide paddle palace panther papaya
    parcel parlor parsley pasture peach pelican pepper petal pewter pillow pilot pistachio plaza
    plume pollen pony poppy porter prairie prism puffin pumice pumpkin python quail quarry
    quiver rabbit radish rafter raisin ranger ravine ribbon river robin rocket rosemary rudder
    saddle salmon sandal sapphire satchel scarlet seagull sequoia shamrock shovel sickle silver
    skillet sparrow spindle spinach squash stable steamer sulfur summit sunset swallow sycamore
    tabby tamarind tangerine teapot thimble thistle ticket timber toffee topaz toucan trellis
    trumpet tundra turnip turquoise turtle valley vanilla vessel viola violet walrus weasel
    whistle willow window winter wolf yarrow yogurt zephyr zinnia
    """
)
"""Plain words of lower-case ASCII; none is part of another, a command, or in a template."""

RESERVED_EVERY = 5

OPEN_WORDS: tuple[str, ...] = tuple(
    word for i, word in enumerate(sorted(WORDS)) if i % RESERVED_EVERY
)
"""Words of training and validation tasks."""

RESERVED_WORDS: tuple[str, ...] = tuple(sorted(WORDS)[::RESERVED_EVERY])
"""A fifth of the words, which test tasks alone use: names have to be copied, not remembered."""

EXTENSIONS = ("txt", "log", "csv", "md", "dat", "cfg", "tmp", "bak")
