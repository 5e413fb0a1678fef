"""Tokens to a `Module` (PTX ISA chapters 4, 5 and 11). Names are resolved here; what an instruction means is not."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from math import prod

from common.emulator.faults import PtxSyntaxError
from common.emulator.ptx.lexer import Token, tokenize
from common.emulator.ptx.module import (
    TYPE_BYTES,
    Address,
    Arguments,
    Function,
    Immediate,
    Instruction,
    Module,
    Not,
    Operand,
    Pair,
    Register,
    Relocation,
    Sink,
    SpecialRegister,
    Symbol,
    Variable,
    Vector,
    immediate_number,
)

_SPACES = ("global", "const", "shared", "local", "param")
_LINKAGE = ("extern", "visible", "weak", "common")
_RANGE = re.compile(r"(.*?)(\d+)$")
_SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)(\.[xyzw])?$"
    r"|%(laneid|warpid|nwarpid|smid|nsmid|gridid|is_explicit_cluster|cluster_ctarank|cluster_nctarank"
    r"|lanemask_(eq|le|lt|ge|gt)|clock|clock_hi|clock64|pm\d+(_64)?|envreg\d+|globaltimer|globaltimer_lo|globaltimer_hi"
    r"|reserved_smem_offset_(begin|end|cap|\d+)|total_smem_size|aggr_smem_size|dynamic_smem_size|current_graph_exec)$"
)
_BINARY = [
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", "<=", ">", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
]
_COUNT_DIRECTIVES = (
    "maxntid",
    "reqntid",
    "minnctapersm",
    "maxnctapersm",
    "maxnreg",
    "maxclusterrank",
    "reqnctapercluster",
)
_FLAG_DIRECTIVES = ("explicitcluster", "blocksareclusters", "noreturn", "abi_preserve_control")


@dataclass
class _Scope:
    """One `{ ... }`: the registers, variables and labels it declares."""

    parent: _Scope | None
    registers: dict[str, Register] = field(default_factory=dict)
    ranges: dict[str, tuple[int, str, dict[int, Register]]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # label or variable as written -> unique name


def parse(text: str) -> Module:
    """Parses one PTX module. Raises `PtxSyntaxError` with the line at anything it does not understand."""
    return _Parser(text).module()


_Line = tuple[int, int]  # file number, line


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text.rstrip("\0")
        self._tokens = tokenize(self._text)
        self._position = 0
        self._module = Module("", "")
        self._registers = 0
        self._unique = 0
        self._source: tuple[_Line, _Line | None] | None = None
        self._sources: list[tuple[Instruction, _Line, _Line | None]] = []
        self._callers: dict[tuple[int, int, int], _Line] = {}  # where the outermost call of an inlined place stands

    # -- tokens ---------------------------------------------------------------------------------------------------

    @property
    def _token(self) -> Token:
        return self._tokens[self._position]

    def _next(self) -> Token:
        token = self._tokens[self._position]
        if token.kind == "end":
            raise self._error("the text ends in the middle of a statement")
        self._position += 1
        return token

    def _accept(self, *texts: str) -> str | None:
        if self._token.text in texts and self._token.kind != "string":
            return self._next().text
        return None

    def _expect(self, text: str) -> Token:
        if self._token.text != text:
            raise self._error(f"expected {text!r}, found {self._token.text!r}")
        return self._next()

    def _error(self, message: str, line: int | None = None) -> PtxSyntaxError:
        line = self._token.line if line is None else line
        shown = self._text.split("\n")[line - 1].strip()
        return PtxSyntaxError(f"PTX line {line}: {message}\n  {shown}")

    def _word(self) -> str:
        if self._token.kind != "word":
            raise self._error(f"expected a name, found {self._token.text!r}")
        return self._next().text

    # -- module ---------------------------------------------------------------------------------------------------

    def module(self) -> Module:
        while self._token.kind != "end":
            self._module_statement()
        for instruction, place, caller in self._sources:
            instruction.source = self._source_name(place)
            instruction.called_from = None if caller is None else self._source_name(caller)
        return self._module

    def _source_name(self, place: _Line) -> str:
        file, line = place
        return f"{self._module.files.get(file, f'file {file}')}:{line}"

    def _module_statement(self) -> None:
        token = self._next()
        if token.text == ";":
            return
        if token.kind != "directive":
            raise self._error(f"expected a directive, found {token.text!r}", token.line)
        name = token.text[1:]
        if name == "version":
            self._module.version = self._next().text
        elif name == "target":
            self._module.target = self._word()
            while self._accept(","):
                self._word()
        elif name == "address_size":
            if self._next().text != "64":
                raise self._error("only .address_size 64 is supported", token.line)
        elif name == "file":
            self._file()
        elif name == "loc":
            self._location()
        elif name == "section":
            self._skip_section()
        elif name == "alias":
            alias = self._word()
            self._expect(",")
            self._module.aliases[alias] = self._word()
            self._expect(";")
        elif name == "pragma":
            self._skip_to_semicolon()
        elif name in _LINKAGE:
            self._linked(extern=name == "extern")
        elif name in ("entry", "func"):
            self._function(name == "entry")
        elif name in _SPACES:
            self._variables(name, extern=False, scope=None, owner=self._module.variables)
        else:
            raise self._error(f"unknown directive .{name}", token.line)

    def _linked(self, extern: bool) -> None:
        while self._token.text[1:] in _LINKAGE:
            extern = extern or self._token.text == ".extern"
            self._next()
        name = self._next().text[1:]
        if name in ("entry", "func"):
            self._function(name == "entry")
        elif name in _SPACES:
            self._variables(name, extern=extern, scope=None, owner=self._module.variables)
        else:
            raise self._error(f"unknown directive .{name}")

    def _file(self) -> None:
        number = self._integer()
        self._module.files[number] = self._next().text.strip('"')
        while self._accept(","):
            self._integer()

    def _location(self) -> None:
        place = file, line, _column = self._integer(), self._integer(), self._integer()
        caller = None
        while self._accept(","):
            self._word()
            if self._token.kind == "word":
                self._word()
                if self._accept("+"):
                    self._integer()
            else:
                call = self._integer(), self._integer(), self._integer()
                caller = self._callers.get(call, call[:2])
        if line:
            self._source = (file, line), caller
        if caller is not None:
            self._callers[place] = caller
        else:
            self._callers.pop(place, None)

    def _skip_section(self) -> None:
        while self._next().text != "{":
            pass
        depth = 1
        while depth:
            text = self._next().text
            depth += (text == "{") - (text == "}")

    def _skip_to_semicolon(self) -> None:
        while self._next().text != ";":
            pass

    # -- variables ------------------------------------------------------------------------------------------------

    def _variables(self, space: str, *, extern: bool, scope: _Scope | None, owner: dict[str, Variable]) -> None:
        align, lanes, kind = self._type_of_declaration()
        while True:
            name = self._word()
            unique = self._declare(scope, name)
            owner[unique] = self._declarator(unique, space, kind, lanes, align, extern)
            if not self._accept(","):
                break
        self._expect(";")

    def _type_of_declaration(self) -> tuple[int, int, str]:
        align, lanes = 0, 1
        while True:
            token = self._next()
            name = token.text[1:]
            if name == "align":
                align = self._integer()
            elif name == "attribute":
                self._skip_parenthesis()
            elif name in ("v2", "v4", "v8"):
                lanes = int(name[1:])
            elif name == "ptr":
                while self._token.text[1:] in ("global", "const", "shared", "local", "align"):
                    if self._next().text == ".align":
                        self._integer()
            elif name in TYPE_BYTES:
                if self._token.text == ".ptr":
                    self._next()
                    while self._token.text[1:] in ("global", "const", "shared", "local", "align"):
                        if self._next().text == ".align":
                            self._integer()
                return align, lanes, name
            else:
                raise self._error(f"expected a type, found {token.text!r}", token.line)

    def _skip_parenthesis(self) -> None:
        self._expect("(")
        depth = 1
        while depth:
            text = self._next().text
            depth += (text == "(") - (text == ")")

    def _declarator(self, name: str, space: str, kind: str, lanes: int, align: int, extern: bool) -> Variable:
        element = TYPE_BYTES[kind] * lanes
        extents: list[int | None] = []
        while self._accept("["):
            extents.append(None if self._token.text == "]" else int(self._expression().value))
            self._expect("]")
        count = None if None in extents else prod(extents)
        data, relocations = None, ()
        if self._accept("="):
            inner = [prod(extents[depth:]) * element for depth in range(1, len(extents))]
            data, relocations = self._initialiser(kind, inner + [element] * (lanes > 1))
            if count is None:
                count = -(-len(data) // element)
            if len(data) > count * element:
                raise self._error(f"{name} has {count * element} bytes, its initialiser {len(data)}")
            data = data.ljust(count * element, b"\0")
        size = None if count is None else count * element
        return Variable(name, space, kind, align or element, size, data, tuple(relocations), extern)

    def _initialiser(self, kind: str, rows: list[int]) -> tuple[bytes, list[Relocation]]:
        """The bytes after `=`. `rows`: bytes that an inner pair of braces stands for, by depth; the rest is zero."""
        data, relocations = bytearray(), []
        size = TYPE_BYTES[kind]

        def item(depth: int) -> None:
            if self._accept("{"):
                start = len(data)
                while not self._accept("}"):
                    item(depth + 1)
                    self._accept(",")
                if 0 < depth <= len(rows):
                    if len(data) - start > rows[depth - 1]:
                        raise self._error("more initial values than the row has elements")
                    data.extend(bytes(start + rows[depth - 1] - len(data)))
                return
            if self._token.kind == "word":
                name = self._word()
                generic = name == "generic" and self._accept("(")
                name = self._word() if generic else name
                if generic:
                    self._expect(")")
                addend = 0
                while sign := self._accept("+", "-"):
                    addend += self._integer() * (1 if sign == "+" else -1)
                relocations.append(Relocation(len(data), name, addend, size))
                data.extend(bytes(size))
                return
            data.extend(self._encode(self._expression(), kind))

        item(0)
        return bytes(data), relocations

    def _encode(self, value: Immediate, kind: str) -> bytes:
        size = TYPE_BYTES[kind]
        if value.kind == "int" and not kind.startswith("f"):
            return (int(value.value) & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
        number = immediate_number(value)
        if kind == "f64":
            return struct.pack("<d", number)
        if kind == "f32":
            return struct.pack("<f", number)
        if value.kind in ("f32", "f64") and not isinstance(value.value, float):
            return int(value.value).to_bytes(size, "little")
        raise self._error(f"a .{kind} variable cannot be initialised with {value.value!r}")

    # -- functions ------------------------------------------------------------------------------------------------

    def _function(self, is_entry: bool) -> None:
        function = Function("", is_entry)
        scope = _Scope(None)
        while self._token.text == ".attribute":
            self._next()
            self._skip_parenthesis()
        returns: list[Variable] = []
        if self._token.text == "(":
            returns = self._parameters(scope)
        while self._token.text == ".attribute":
            self._next()
            self._skip_parenthesis()
        function.name = self._word()
        function.returns = returns
        if self._token.text == "(":
            function.parameters = self._parameters(scope)
        while self._token.text not in ("{", ";"):
            self._function_directive(function)
        for variable in function.parameters + function.returns:
            function.variables[variable.name] = variable
        if self._accept(";"):
            function.has_body = False
            self._module.functions.setdefault(function.name, function)
            return
        self._module.functions[function.name] = function
        self._source = None
        self._block(function, scope, pending := [])
        self._resolve(function, pending)

    def _parameters(self, scope: _Scope) -> list[Variable]:
        parameters: list[Variable] = []
        self._expect("(")
        while not self._accept(")"):
            space = self._next().text[1:]
            if space not in ("param", "reg"):
                raise self._error(f"expected a parameter, found .{space}")
            align, lanes, kind = self._type_of_declaration()
            name = "_" if self._accept("_") else self._word()
            parameters.append(self._declarator(self._declare(scope, name), "param", kind, lanes, align, False))
            self._accept(",")
        return parameters

    def _function_directive(self, function: Function) -> None:
        name = self._next().text[1:]
        if name in _COUNT_DIRECTIVES:
            values = [self._integer()]
            while self._accept(","):
                values.append(self._integer())
            function.directives[name] = tuple(values)
        elif name in _FLAG_DIRECTIVES:
            function.directives[name] = ()
        elif name == "pragma":
            self._skip_to_semicolon()
        elif name == "attribute":
            self._skip_parenthesis()
        elif name == "abi_preserve":
            self._integer()
        else:
            raise self._error(f"unknown function directive .{name}")

    def _block(self, function: Function, scope: _Scope, pending: list[tuple[Instruction, _Scope]]) -> None:
        self._expect("{")
        while not self._accept("}"):
            token = self._token
            if token.kind == "end":
                raise self._error("the function body is not closed")
            if token.text == "{":
                self._block(function, _Scope(scope), pending)
            elif token.kind == "directive":
                self._body_directive(function, scope, pending)
            elif token.text == ";":
                self._next()
            elif token.kind == "word" and self._tokens[self._position + 1].text == ":":
                self._label(function, scope)
            else:
                pending.append((self._instruction(function, scope), scope))

    def _label(self, function: Function, scope: _Scope) -> None:
        name = self._word()
        self._expect(":")
        unique = self._declare(scope, name)
        if self._token.text in (".branchtargets", ".calltargets"):
            kind = self._next().text
            targets = [self._word()]
            while self._accept(","):
                targets.append(self._word())
            self._expect(";")
            if kind == ".branchtargets":
                function.branch_targets[unique] = tuple(targets)
        elif self._token.text == ".callprototype":
            self._skip_to_semicolon()
        else:
            function.labels[unique] = len(function.instructions)

    def _body_directive(self, function: Function, scope: _Scope, pending: list) -> None:
        token = self._next()
        name = token.text[1:]
        if name == "reg":
            self._register_declaration(scope)
        elif name in _SPACES:
            self._variables(name, extern=False, scope=scope, owner=function.variables)
        elif name == "extern":
            self._variables(self._next().text[1:], extern=True, scope=scope, owner=function.variables)
        elif name == "loc":
            self._location()
        elif name == "file":
            self._file()
        elif name == "pragma":
            self._skip_to_semicolon()
        else:
            raise self._error(f"unknown directive .{name}", token.line)

    def _register_declaration(self, scope: _Scope) -> None:
        _align, lanes, kind = self._type_of_declaration()
        if lanes != 1:
            raise self._error("vector registers (.reg .v2/.v4) are not supported; use scalar registers")
        while True:
            name = self._word()
            if self._accept("<"):
                scope.ranges[name] = (self._integer(), kind, {})
                self._expect(">")
            else:
                scope.registers[name] = self._new_register(name, kind)
            if not self._accept(","):
                break
        self._expect(";")

    def _new_register(self, name: str, kind: str) -> Register:
        self._registers += 1
        return Register(name, kind, self._registers - 1)

    def _declare(self, scope: _Scope | None, name: str) -> str:
        """A unique name for a label or variable: the name itself unless an outer scope or an earlier one has it."""
        if scope is None:
            return name
        if scope.parent is None:
            scope.names[name] = name
            return name
        self._unique += 1
        scope.names[name] = f"{name}@{self._unique}"
        return scope.names[name]

    def _lookup_register(self, scope: _Scope | None, name: str) -> Register | None:
        match = _RANGE.match(name)
        while scope is not None:
            if name in scope.registers:
                return scope.registers[name]
            if match and match.group(1) in scope.ranges:
                count, kind, made = scope.ranges[match.group(1)]
                number = int(match.group(2))
                if number < count:
                    if number not in made:
                        made[number] = self._new_register(name, kind)
                    return made[number]
            scope = scope.parent
        return None

    # -- instructions ---------------------------------------------------------------------------------------------

    def _instruction(self, function: Function, scope: _Scope) -> Instruction:
        start = self._token
        guard, negated = None, False
        if self._accept("@"):
            negated = self._accept("!") is not None
            name = self._word()
            guard = self._lookup_register(scope, name)
            if guard is None:
                raise self._error(f"unknown predicate {name}", start.line)
        opcode = self._word()
        parts = opcode.split(".")
        while self._token.kind == "directive":  # `mov .u32`: white space before a modifier
            parts.append(self._next().text[1:])
        operands: list[Operand] = []
        while self._token.text != ";":
            operands.append(self._operand(scope))
            if not self._accept(","):
                break
        end = self._expect(";")
        text = " ".join(self._text[start.start : end.start].split())
        instruction = Instruction(parts[0], tuple(parts[1:]), tuple(operands), guard, negated, start.line, None, text)
        if self._source:
            self._sources.append((instruction, *self._source))
        function.instructions.append(instruction)
        return instruction

    def _operand(self, scope: _Scope) -> Operand:
        token = self._token
        if token.text == "[":
            return self._address(scope)
        if token.text == "{":
            self._next()
            items = self._items(scope, "}")
            return self._maybe_pair(scope, Vector(items))
        if token.text == "(" and not self._is_expression():
            self._next()
            return Arguments(self._items(scope, ")"))
        if token.text == "!":
            self._next()
            return Not(self._operand(scope))
        if token.kind == "word":
            return self._maybe_pair(scope, self._name(scope))
        return self._expression()

    def _is_expression(self) -> bool:
        """Whether the parenthesis here opens a constant expression rather than call arguments."""
        following = self._tokens[self._position + 1]
        return following.kind == "number" or following.text in ("-", "~", "+", "(")

    def _items(self, scope: _Scope, close: str) -> tuple[Operand, ...]:
        items: list[Operand] = []
        while not self._accept(close):
            items.append(self._operand(scope))
            self._accept(",")
        return tuple(items)

    def _maybe_pair(self, scope: _Scope, first: Operand) -> Operand:
        if self._accept("|"):
            return Pair(first, self._operand(scope))
        return first

    def _name(self, scope: _Scope) -> Operand:
        name = self._word()
        if name == "_":
            return Sink()
        if name == "WARP_SZ":
            return Immediate(32)
        if register := self._lookup_register(scope, name):
            return register
        if _SPECIAL.match(name):
            return SpecialRegister(name[1:])
        if name.startswith("%"):
            raise self._error(f"unknown register {name}")
        offset = 0
        while sign := self._accept("+", "-"):
            offset += self._integer() * (1 if sign == "+" else -1)
        return Symbol(name, offset)

    def _address(self, scope: _Scope) -> Address:
        self._expect("[")
        base: Operand | None = None
        offset = 0
        if self._token.kind == "word":
            base = self._name(scope)
            if isinstance(base, Symbol):
                base, offset = Symbol(base.name), base.offset
        elif self._token.text != "{":
            offset = self._integer()
        while sign := self._accept("+", "-"):
            offset += self._integer() * (1 if sign == "+" else -1)
        items = []
        while self._accept(","):
            items.append(self._operand(scope))
        self._expect("]")
        return Address(base, offset, tuple(items))

    # -- constant expressions -------------------------------------------------------------------------------------

    def _integer(self) -> int:
        value = self._unary()
        if value.kind != "int":
            raise self._error("expected an integer")
        return int(value.value)

    def _expression(self, level: int = 0) -> Immediate:
        if level == len(_BINARY):
            return self._unary()
        left = self._expression(level + 1)
        while self._token.text in _BINARY[level]:
            operator = self._next()
            right = self._expression(level + 1)
            try:
                left = Immediate(_apply(operator.text, left.value, right.value), left.kind)
            except (ArithmeticError, TypeError, ValueError) as error:
                raise self._error(f"{left.value} {operator.text} {right.value}: {error}", operator.line) from None
        if level == 0 and self._accept("?"):
            then = self._expression()
            self._expect(":")
            other = self._expression()
            return then if left.value else other
        return left

    def _unary(self) -> Immediate:
        token = self._next()
        text = token.text
        if text == "-":
            inner = self._unary()
            return Immediate(-inner.value, inner.kind) if inner.kind == "int" else _negated(inner)
        if text == "+":
            return self._unary()
        if text == "~":
            return Immediate(~int(self._unary().value))
        if text == "!":
            return Immediate(int(not self._unary().value))
        if text == "(":
            if self._token.text in (".s64", ".u64"):
                self._next()
                self._expect(")")
                return self._unary()
            value = self._expression()
            self._expect(")")
            return value
        if token.kind == "number":
            return _number(text)
        raise self._error(f"expected a constant, found {text!r}", token.line)

    # -- names that may be used before they are declared -----------------------------------------------------------

    def _resolve(self, function: Function, pending: list[tuple[Instruction, _Scope]]) -> None:
        for instruction, scope in pending:
            instruction.operands = tuple(self._resolved(operand, scope) for operand in instruction.operands)

    def _resolved(self, operand: Operand, scope: _Scope) -> Operand:
        if isinstance(operand, Symbol):
            return Symbol(_unique_name(scope, operand.name), operand.offset)
        if isinstance(operand, Address):
            base = self._resolved(operand.base, scope) if operand.base is not None else None
            return Address(base, operand.offset, tuple(self._resolved(i, scope) for i in operand.items))
        if isinstance(operand, (Vector, Arguments)):
            return type(operand)(tuple(self._resolved(i, scope) for i in operand.items))
        return operand


def _unique_name(scope: _Scope | None, name: str) -> str:
    while scope is not None:
        if name in scope.names:
            return scope.names[name]
        scope = scope.parent
    return name


def _number(text: str) -> Immediate:
    lower = text.lower()
    if lower.startswith("0f"):
        return Immediate(int(text[2:], 16), "f32")
    if lower.startswith("0d"):
        return Immediate(int(text[2:], 16), "f64")
    if lower.startswith("0x"):
        return Immediate(int(lower.rstrip("u"), 16))
    if lower.startswith("0b"):
        return Immediate(int(lower, 2))
    if "." in text or "e" in lower:
        return Immediate(float(text), "f64")
    digits = lower.rstrip("u")
    return Immediate(int(digits, 8 if digits.startswith("0") and len(digits) > 1 else 10))


def _negated(value: Immediate) -> Immediate:
    if isinstance(value.value, float):
        return Immediate(-value.value, value.kind)
    return Immediate(value.value ^ (1 << (31 if value.kind == "f32" else 63)), value.kind)


def _apply(operator: str, left: int | float, right: int | float) -> int | float:
    """Binary operators of PTX constant expressions; `/` and `%` truncate towards zero as in C."""
    if operator == "/":
        quotient = abs(left) // abs(right)
        return quotient if (left < 0) == (right < 0) else -quotient
    if operator == "%":
        return left - right * _apply("/", left, right)
    return {
        "+": lambda: left + right, "-": lambda: left - right, "*": lambda: left * right,
        "<<": lambda: left << right, ">>": lambda: left >> right, "&": lambda: left & right, "|": lambda: left | right,
        "^": lambda: left ^ right, "&&": lambda: int(bool(left and right)), "||": lambda: int(bool(left or right)),
        "==": lambda: int(left == right), "!=": lambda: int(left != right), "<": lambda: int(left < right),
        "<=": lambda: int(left <= right), ">": lambda: int(left > right), ">=": lambda: int(left >= right),
    }[operator]()  # fmt: skip
