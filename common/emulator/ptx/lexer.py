"""PTX text to tokens (PTX ISA chapter 4)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from common.emulator.faults import PtxSyntaxError


class Token(NamedTuple):
    kind: str  # word, directive, number, string, punct, end
    text: str
    line: int
    start: int


_PATTERN = re.compile(
    r"""
    (?P<space>[ \t\r\f]+|//[^\n]*)
  | (?P<newline>\n)
  | (?P<comment>/\*.*?\*/)
  | (?P<number>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
      |\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)
  | (?P<word>[%$A-Za-z_][\w$%]*(?:(?:\.|::)[\w$:]+)*)
  | (?P<directive>\.[A-Za-z_][\w:]*)
  | (?P<string>"[^"]*")
  | (?P<punct><<|>>|<=|>=|==|!=|&&|\|\||[-+*/%~!<>&|^?:;,.(){}\[\]=@])
    """,
    re.VERBOSE | re.DOTALL,
)


def tokenize(text: str) -> list[Token]:
    """All tokens of `text`, closed by one of kind "end". Raises PtxSyntaxError at a character that fits nothing."""
    return list(_tokens(text))


def _tokens(text: str) -> Iterator[Token]:
    position, line = 0, 1
    match_at = _PATTERN.match
    while position < len(text):
        match = match_at(text, position)
        if match is None:
            raise PtxSyntaxError(f"PTX line {line}: unexpected character {text[position]!r}")
        kind = match.lastgroup
        if kind == "newline":
            line += 1
        elif kind == "comment":
            line += match.group().count("\n")
        elif kind != "space":
            yield Token(kind, match.group(), line, position)
            if kind == "string":
                line += match.group().count("\n")
        position = match.end()
    yield Token("end", "", line, position)
