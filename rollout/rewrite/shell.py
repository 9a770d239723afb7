"""Reads shell commands just far enough to tell looking from doing, and literals from results."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace

_OPERATORS = "|&;<>()"
_REDIRECTIONS = frozenset({">", ">>", ">&", "&>", ">|", "<", "<<<", "<<", "<&"})
_WRITES = frozenset({">", ">>", "&>", ">|"})
_SINKS = frozenset({"/dev/null", "1", "2"})


def _split(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = _split(
    "ls cat head tail grep egrep fgrep wc find pwd sort uniq cut tr nl od file stat du diff cmp "
    "comm test [ basename dirname realpath readlink sed awk echo printf seq expr which type "
    "true date id whoami md5sum sha1sum sha256sum rev tac paste column less more tree"
)
"""Commands that change nothing by themselves when their output goes nowhere."""

SAYS = _split("echo printf seq expr")
"""Commands whose output is what they were told; it proves nothing about the sandbox."""

CHANGES = _split(
    "mkdir rmdir rm mv cp ln touch chmod truncate tee dd install split csplit tar gzip gunzip zip "
    "unzip xargs cd pushd popd export unset set exec eval source . : read for do done while until "
    "if then else elif fi case esac { } ! time shuf join sleep mktemp rename jq"
)
"""Other commands and shell words that may stand at the head of an action."""

_CHANGING_OPTIONS = {
    "sed": re.compile(r"-\w*i|--in-place"),
    "sort": re.compile(r"-\w*o|--output"),
    "find": re.compile(r"-(delete|exec|execdir|ok|okdir|fprint\w*|fls)$"),
}
_WORD = re.compile(r"[A-Za-z0-9]+")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_SUBSTITUTION = re.compile(r"s(?P<mark>[^\w\s\\])(.*?)(?P=mark)(?P<new>.*?)(?P=mark)")
_AWK_WORDS = re.compile(r"\b(BEGIN|END|print|printf|exit)\b")
_COMPUTED = re.compile(r"\$\{?[A-Za-z_]\w*\}?|`[^`]*`|\\[a-z]|%[a-z]")
_OPERATOR = re.compile(r">>|>\||&>|>&|<<<|<<|<&|[<>]|\|\||&&|\|&|;;|[|&;()]")
# Arithmetic on literals stays a literal.
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
_INNERMOST = re.compile(r"\$\(([^()]*)\)")
_DESCRIPTOR = re.compile(r"(?<!\S)[12](?=>)")


@dataclass(frozen=True, slots=True)
class Simple:
    """One simple command of a line.

    Attributes:
      name: its first word; empty for a bare redirection.
      arguments: the words after it.
      writes: files that its output is redirected to.
      here: literal text given on standard input.
      piped: whether its output goes to the next command.
    """

    name: str
    arguments: tuple[str, ...]
    writes: tuple[str, ...]
    here: tuple[str, ...]
    piped: bool


def parse(command: str) -> tuple[Simple, ...] | None:
    """The simple commands of one line, substituted ones first; None when quotes don't close."""
    line = _ARITHMETIC.sub(lambda m: "_".join(_WORD.findall(m[1])), command)
    line = _DESCRIPTOR.sub("", line)
    found: list[Simple] = []
    while (inner := _INNERMOST.search(line)) is not None:
        substituted = parse(inner[1])
        if substituted is None:
            return None
        found += [replace(simple, piped=True) for simple in substituted]
        line = f"{line[: inner.start()]}$_{line[inner.end() :]}"
    lexer = shlex.shlex(line, posix=True, punctuation_chars=_OPERATORS)
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        tokens = list(lexer)
    except ValueError:
        return None
    words: list[str] = []
    writes: list[str] = []
    here: list[str] = []
    redirection = ""
    for token in [part for t in [*tokens, ";"] for part in _parts(t)]:
        if token in _REDIRECTIONS:
            redirection = token
        elif token and all(c in _OPERATORS for c in token):
            if words or writes:
                arguments = tuple(words[1:])
                name = words[0] if words else ""
                piped = token in ("|", "|&")
                found.append(Simple(name, arguments, tuple(writes), tuple(here), piped))
            words, writes, here, redirection = [], [], [], ""
        elif redirection:
            if redirection in _WRITES and token not in _SINKS:
                writes.append(token)
            if redirection == "<<<":
                here.append(token)
            redirection = ""
        else:
            words.append(token)
    return tuple(found)


def _parts(token: str) -> list[str]:
    """A run of operators comes as one token from the lexer; any other token stays whole."""
    if token and all(c in _OPERATORS for c in token):
        return _OPERATOR.findall(token)
    return [token]


def words_of(texts: Iterable[str]) -> frozenset[str]:
    """Runs of letters and digits in the texts."""
    return frozenset(word for text in texts for word in _WORD.findall(text))


def is_view(command: str) -> bool:
    """Whether the line only looks: it changes neither files nor the shell."""
    simples = parse(command)
    if not simples or "`" in command:
        return False
    return all(_looks(simple) for simple in simples)


def is_evidence(command: str) -> bool:
    """Whether what the line prints comes out of the sandbox and not out of the line itself."""
    return any(simple.name not in SAYS for simple in parse(command) or ())


def literals(command: str) -> frozenset[str]:
    """Words that the line writes as they stand, rather than computing them."""
    simples = parse(command) or ()
    texts: list[str] = []
    for position, simple in enumerate(simples):
        texts += simple.here
        if _ASSIGNMENT.match(simple.name):
            texts.append(simple.name.split("=", 1)[1])
        if simple.name == "for":
            texts += simple.arguments[2:]
        if simple.name in SAYS and (simple.piped or simple.writes):
            texts += [a for a in simple.arguments if not a.startswith("-")]
        if simple.name == "awk":
            texts += [_AWK_WORDS.sub(" ", a) for a in simple.arguments if "BEGIN" in a]
        # A substitution writes where it edits in place, or hands its result on.
        if simple.name == "sed" and (not _looks(simple) or simple.piped or position):
            texts += [m["new"] for a in simple.arguments for m in _SUBSTITUTION.finditer(a)]
    return words_of(_COMPUTED.sub(" ", text) for text in texts)


def heads(command: str) -> tuple[str, ...]:
    """First words of the line's simple commands, assignments left out."""
    simples = parse(command) or ()
    return tuple(s.name for s in simples if s.name and not _ASSIGNMENT.match(s.name))


def _looks(simple: Simple) -> bool:
    if simple.name not in VIEWS or simple.writes:
        return False
    changing = _CHANGING_OPTIONS.get(simple.name)
    return changing is None or not any(changing.match(a) for a in simple.arguments)
