"""Text to token ids and back; control tokens only ever come from markup, never from text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from rollout.errors import UserError

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
MARKERS = (
    END_OF_TEXT,
    TURN_START,
    TURN_END,
    "<think>",
    "</think>",
    "<tool_response>",
    "</tool_response>",
)
"""Control strings that every tokenizer here must hold as single tokens."""

PIECE_PATTERN = r" ?[a-z]+| ?[A-Z]+| ?[0-9]+| ?[!-/:-@\[-`{-~]+|\n"
"""Words, numbers and runs of operators, each with the space before it; a newline alone."""

_FILE = "tokenizer.json"
_FILES = (_FILE, "vocab.json")


class Tokenizer:
    """A fast tokenizer with two doors: `encode` for text, `control` for markup.

    Text goes through a copy of the tokenizer that holds no added tokens at all, so that an
    observation cannot forge a turn, whatever it contains.
    """

    def __init__(self, full: tokenizers.Tokenizer, *, origin: str = "tokenizer") -> None:
        self._full = full
        description: dict[str, Any] = json.loads(full.to_str())
        added = {token["content"]: int(token["id"]) for token in description["added_tokens"]}
        for marker in MARKERS:
            if marker not in added:
                raise UserError(
                    f"{origin} has no control token {marker!r}; a Qwen vocabulary is needed, "
                    f"with {', '.join(MARKERS)}"
                )
        vocab: dict[str, int] = description["model"]["vocab"]
        description["model"]["vocab"] = {k: i for k, i in vocab.items() if k not in added}
        description["added_tokens"] = []
        description["post_processor"] = None
        self._text = tokenizers.Tokenizer.from_str(json.dumps(description))
        self._control_ids = frozenset(added.values())
        ids: dict[str, int] = full.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(ids.values()) + 1
        self.pad_id: int = added[END_OF_TEXT]
        self.stop_ids: tuple[int, ...] = (added[TURN_END], added[END_OF_TEXT])
        ordered = json.dumps(sorted(ids.items()), ensure_ascii=True).encode()
        self.digest: str = hashlib.sha256(ordered).hexdigest()

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that text never becomes."""
        return self._control_ids

    def encode(self, text: str) -> list[int]:
        """Ids of `text` taken as plain text: no control id comes out."""
        clean = text.encode("utf-8", "replace").decode("utf-8")
        return list(self._text.encode(clean, add_special_tokens=False).ids)

    def control(self, markup: str) -> list[int]:
        """Ids of our own markup, in which control strings are control tokens."""
        return list(self._full.encode(markup, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        return str(self._full.decode(list(ids), skip_special_tokens=False))

    def save(self, directory: Path) -> None:
        """Write a directory that `load` and `transformers` read."""
        directory.mkdir(parents=True, exist_ok=True)
        self._full.save(str(directory / _FILE))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": END_OF_TEXT,
            "eos_token": TURN_END,
            "clean_up_tokenization_spaces": False,
        }
        text = json.dumps(config, indent=2) + "\n"
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def load(directory: Path) -> Tokenizer:
    """The fast tokenizer of a Hugging Face directory, as `transformers` reads it.

    Raises:
      UserError: when the directory holds no fast tokenizer, or one without Qwen's markers.
    """
    # Imported here: it takes about a second, and the embedded run reads no directory.
    from transformers import AutoTokenizer

    if not any((directory / name).is_file() for name in _FILES):
        raise UserError(f"none of {', '.join(_FILES)} in {directory}; a fast tokenizer is needed")
    try:
        found = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (ValueError, TypeError, KeyError, OSError, AttributeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{directory}: no readable tokenizer ({reason})") from error
    full = getattr(found, "backend_tokenizer", None)
    if full is None:
        raise UserError(f"{directory}: {type(found).__name__} is no fast tokenizer")
    # A copy: `transformers` switches padding and truncation of its own on and off.
    return Tokenizer(tokenizers.Tokenizer.from_str(full.to_str()), origin=str(directory))


def shell_tokenizer(pieces: Iterable[str], *, runs: Sequence[str] = ()) -> Tokenizer:
    """A small byte-level tokenizer in which each known word, number or operator is one token.

    There are no merges: what is not in the vocabulary falls apart into its bytes, so any text
    comes back exactly. The same pieces in any order give the same vocabulary.

    Args:
      pieces: words or whole texts; each of their pieces enters plain and with a leading space.
      runs: markup to hold as single control tokens beside `MARKERS`.
    """
    split = pre_tokenizers.Split(tokenizers.Regex(PIECE_PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # Words share few pieces; a joined text is split in one call instead of one a word.
    joined = "\n".join(sorted({*pieces}))
    plain = {piece.removeprefix(" ") for piece, _ in split.pre_tokenize_str(joined)}
    words = sorted(plain - {"", "\n", " "})
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for word in words:
        for spelled in (word, f" {word}"):
            ((symbol, _),) = to_bytes.pre_tokenize_str(spelled)
            vocab.setdefault(symbol, len(vocab))
    full = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    full.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    full.decoder = decoders.ByteLevel()
    special = [*MARKERS, *(run for run in runs if run not in MARKERS)]
    full.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in special]
    )
    return Tokenizer(full)
