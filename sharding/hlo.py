"""What a compiled program does, read from its HLO text: collectives and matmuls by loop trips.

XLA's own cost analysis counts the body of a loop once; here each instruction counts as often as
the loops around it run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16}
_SHAPE = re.compile(r"\b([a-z]+[0-9]*(?:e[0-9]+m[0-9]+\w*)?)\[([0-9,<=]*)\]")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{\s*$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'known_trip_count"?:\{"?n"?:"?([0-9]+)')


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind.

    Attributes:
      instructions: in the text.
      calls: by loop trips, in one run of the program.
      bytes: of the larger of operand and result on one device, by loop trips.
    """

    instructions: int
    calls: int
    bytes: int


@dataclass(frozen=True)
class Summary:
    """What one run of a program does on one device.

    Attributes:
      collectives: by kind; only kinds that occur.
      matmul_flops: 2 x multiply-adds of matrix products and convolutions, by loop trips.
      unknown_loops: loops whose trips the text does not tell; they count once.
    """

    collectives: Mapping[str, Collective]
    matmul_flops: int
    unknown_loops: int


@dataclass
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: list[str]
    line: str


@dataclass
class _Computation:
    instructions: dict[str, _Instruction] = field(default_factory=dict)


def summarize(text: str) -> Summary:
    """Count collectives and matmuls of a compiled module.

    Args:
      text: optimized HLO, as `compiled.as_text()` gives it.

    Returns:
      The summary.

    Raises:
      ValueError: for a text without an entry computation.
    """
    computations, entry = _parse(text)
    weights: dict[str, int] = dict.fromkeys(computations, 0)
    unknown = 0
    scatters, continued = set(), set()
    order = _topological(computations, entry)
    weights[entry] = 1
    for name in order:
        weight = weights[name]
        for instruction in computations[name].instructions.values():
            trips = 1
            if instruction.opcode == "while":
                found = _trips(instruction, computations)
                unknown += found is None
                trips = 1 if found is None else found
            for called in _called(instruction.line):
                if called in weights:
                    weights[called] += weight * trips
                if instruction.opcode == "fusion" and "reduce-scatter" in instruction.name:
                    scatters.add(called)
                if instruction.opcode == "fusion" and "all-reduce-scatter" in called:
                    scatters.add(called)
                # A TPU carries a collective on in steps beside other work, maybe in a loop within:
                # start, steps and end all hold the instruction, and only the start counts.
                if called.startswith("async_collective_fusion") or instruction.name.startswith(
                    "async-collective-done"
                ):
                    continued.add(called)
    counts = {kind: [0, 0, 0] for kind in KINDS}
    flops = 0
    for name in order:
        computation, weight = computations[name], weights[name]
        for instruction in computation.instructions.values():
            kind = instruction.opcode.removesuffix("-start")
            if kind in counts and not instruction.opcode.endswith("-done"):
                if name in continued:
                    continue
                # A TPU fuses a sum with the cut that follows and still calls it all-reduce.
                if kind == "all-reduce" and name in scatters:
                    kind = "reduce-scatter"
                moved = max(
                    [_largest(instruction.type)]
                    + [_largest(t) for t in _operand_types(instruction, computation)]
                )
                for slot, value in enumerate((1, weight, weight * moved)):
                    counts[kind][slot] += value
            elif kind == "dot":
                flops += weight * _dot_flops(instruction, computation)
            elif kind == "convolution":
                flops += weight * _convolution_flops(instruction, computation)
    return Summary(
        collectives={kind: Collective(*c) for kind, c in counts.items() if c[0]},
        matmul_flops=flops,
        unknown_loops=unknown,
    )


def logit_arrays(text: str, *, tokens: set[int], vocabulary: set[int]) -> list[str]:
    """Shapes in a program that hold a row's tokens times the vocabulary.

    Args:
      text: HLO.
      tokens: counts of tokens that no array of logits may have: of a row, and of its parts.
      vocabulary: sizes of the vocabulary: whole, and of a device.

    Returns:
      Distinct shapes with one dimension in `vocabulary` whose others have one in `tokens` or
      multiply to one, sorted.
    """
    found = set()
    for match in _SHAPE.finditer(text):
        sizes = _dims(match[2])
        for index, size in enumerate(sizes):
            others = sizes[:index] + sizes[index + 1 :]
            if size in vocabulary and (tokens & set(others) or math.prod(others) in tokens):
                found.add(f"{match[1]}[{match[2]}]")
    return sorted(found)


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    entry = None
    current: _Computation | None = None
    for line in text.splitlines():
        if current is not None and (match := _INSTRUCTION.match(line)):
            rest = line[match.end() :]
            type_, rest = _split_type(rest)
            opcode, _, arguments = rest.partition("(")
            operands = re.findall(r"%([\w.\-]+)", _closed(arguments))
            current.instructions[match[1]] = _Instruction(
                match[1], type_, opcode.strip(), operands, line
            )
        elif match := _COMPUTATION.match(line):
            current = computations.setdefault(match[2], _Computation())
            entry = match[2] if match[1] else entry
    if entry is None:
        raise ValueError("the text has no entry computation, so it is no HLO module")
    return computations, entry


def _split_type(rest: str) -> tuple[str, str]:
    """The type before an opcode; a tuple's type has brackets and blanks in it."""
    if not rest.startswith("("):
        type_, _, rest = rest.partition(" ")
        return type_, rest
    inner = _closed(rest[1:])
    return rest[: len(inner) + 2], rest[len(inner) + 2 :].lstrip()


def _closed(text: str) -> str:
    """Text up to the bracket that closes one opened before it."""
    depth = 1
    for index, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[:index]
    return text


def _called(line: str) -> Iterator[str]:
    yield from _CALLED.findall(line)
    for group in _BRANCHES.findall(line):
        yield from re.findall(r"%?([\w.\-]+)", group)


def _topological(computations: Mapping[str, _Computation], entry: str) -> list[str]:
    """Computations that the entry reaches, callers before callees."""
    done: list[str] = []
    seen = {entry}
    stack: list[tuple[str, Iterator[str]]] = [(entry, _callees(computations, entry))]
    while stack:
        name, callees = stack[-1]
        following = next((c for c in callees if c in computations and c not in seen), None)
        if following is None:
            done.append(name)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, _callees(computations, following)))
    return done[::-1]


def _callees(computations: Mapping[str, _Computation], name: str) -> Iterator[str]:
    for instruction in computations[name].instructions.values():
        yield from _called(instruction.line)


def _trips(loop: _Instruction, computations: Mapping[str, _Computation]) -> int | None:
    if match := _TRIPS.search(loop.line):
        return int(match[1])
    condition = re.search(r"condition=%?([\w.\-]+)", loop.line)
    if condition is None or condition[1] not in computations:
        return None
    inside = computations[condition[1]].instructions.values()
    constants = [
        int(match[1])
        for i in inside
        if (match := re.search(r"s32\[\].* constant\((\d+)\)", i.line))
    ]
    return constants[0] if len(constants) == 1 else None


def _dims(text: str) -> list[int]:
    return [int(n.lstrip("<=")) for n in text.split(",") if n]


def _largest(type_: str) -> int:
    """Bytes of the largest array of a type."""
    sizes = [0]
    for dtype, dims in _SHAPE.findall(type_):
        bits = re.search(r"\d+", dtype)
        width = _BYTES.get(dtype) or (max(int(bits[0]) // 8, 1) if bits else 0)
        sizes.append(width * math.prod(_dims(dims)))
    return max(sizes)


def _operand_types(instruction: _Instruction, computation: _Computation) -> list[str]:
    known = computation.instructions
    return [known[name].type for name in instruction.operands if name in known]


def _shape_of(type_: str) -> list[int]:
    match = _SHAPE.search(type_)
    return _dims(match[2]) if match else []


def _dot_flops(instruction: _Instruction, computation: _Computation) -> int:
    (left, *_) = _operand_types(instruction, computation)
    contracted = re.search(r"lhs_contracting_dims=\{([0-9,]*)\}", instruction.line)
    sizes = _shape_of(left)
    summed = math.prod(sizes[d] for d in (_dims(contracted[1]) if contracted else []))
    return 2 * math.prod(_shape_of(instruction.type)) * summed


def _convolution_flops(instruction: _Instruction, computation: _Computation) -> int:
    """2 x multiply-adds; a TPU writes batched matrix products as convolutions.

    A batch dimension becomes a spatial one whose dilation and padding leave one valid place a
    window, so only places inside the input count.
    """
    left, right = (_shape_of(t) for t in _operand_types(instruction, computation)[:2])
    out = _shape_of(instruction.type)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.line)
    if labels is None:
        return 0
    of_left, of_right, of_out = labels[1], labels[2], labels[3]
    window = re.search(r"window=\{([^}]*)\}", instruction.line)
    options = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}
    total = 2 * out[of_out.index("b")] * out[of_out.index("f")] * right[of_right.index("i")]
    for dimension, label in enumerate(sorted(c for c in of_out if c.isdigit())):

        def option(name: str, default: str, dimension: int = dimension) -> str:
            return options[name].split("x")[dimension] if name in options else default

        low = int(option("pad", "0_0").split("_")[0])
        stride, dilation = int(option("stride", "1")), int(option("lhs_dilate", "1"))
        step = int(option("rhs_dilate", "1"))
        span = (left[of_left.index(label)] - 1) * dilation
        position = np.arange(out[of_out.index(label)])[:, None] * stride - low
        place = position + np.arange(right[of_right.index(label)]) * step
        total *= int(np.sum((place >= 0) & (place <= span) & (place % dilation == 0)))
    return total
