"""PTX text → functions, variables and instructions (PTX ISA 9.x, the subset compilers emit plus inline assembly)."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache

from numba_engine.backends.ptx.errors import ErrorKind, PtxError

TYPE_BYTES = {
    "pred": 1,
    **{f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64, 128)},
    "f16": 2,
    "bf16": 2,
    "f16x2": 4,
    "bf16x2": 4,
    "f32": 4,
    "f64": 8,
}


@dataclass(frozen=True, slots=True)
class Register:
    """A virtual register, or a special one such as ``%tid.x``."""

    name: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Immediate:
    """A literal. Floating ones (0f…, 0d…) carry their value as a Python float, integers may be negative."""

    value: int | float


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """``[base + offset]``; base is a register, a symbol's name, or None for an absolute address."""

    base: Register | Symbol | None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b, …}``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``d|p``: a destination with a second one."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Sink:
    """``_``: a result nobody wants."""


Operand = Register | Immediate | Symbol | Address | Vector | Pair | Sink


def both_results(operand: Operand) -> tuple[Operand, Operand | None]:
    """A destination and its second one, where there is one that is wanted."""
    if not isinstance(operand, Pair):
        return operand, None
    return operand.first, None if isinstance(operand.second, Sink) else operand.second


@dataclass(frozen=True, slots=True)
class Instruction:
    """One statement. ``parts`` is the opcode split at its dots: ``ld.global.v4.u32`` → (ld, global, v4, u32)."""

    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    line: int
    text: str
    source: tuple[int, int] | None
    """(file number, line) of the last ``.loc``."""

    @property
    def name(self) -> str:
        return self.parts[0]

    @property
    def opcode(self) -> str:
        return ".".join(self.parts)


@dataclass(frozen=True, slots=True)
class Label:
    name: str


@dataclass(frozen=True, slots=True)
class Variable:
    """A declaration outside registers: ``space`` is global, const, shared, local or param."""

    name: str
    space: str
    align: int
    nbytes: int
    initial: bytes | None = None
    is_extern: bool = False
    element: str = "b8"
    """PTX type of one element."""


@dataclass(slots=True)
class Function:
    name: str
    is_entry: bool
    params: list[Variable] = field(default_factory=list)
    returns: list[Variable] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    """Register name → type without the dot."""
    variables: dict[str, Variable] = field(default_factory=dict)
    """Local, shared and param variables declared inside the body."""
    body: list[Instruction | Label] = field(default_factory=list)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    max_threads: int | None = None


@dataclass(slots=True)
class Module:
    functions: dict[str, Function]
    variables: dict[str, Variable]
    files: dict[int, str]
    target: str
    version: str
    num_lines: int

    @property
    def entries(self) -> list[Function]:
        return [function for function in self.functions.values() if function.is_entry]


def parse(text: str) -> Module:
    """Parse a PTX module. Raises PtxError(kind "syntax") naming the line."""
    return _Parser(text).module()


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_SPACE = re.compile(r"\s+")
_LABEL = re.compile(r"([\w$%.]+)\s*:(?!:)")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)[^\n]*")
_FILE = re.compile(r"\.file\s+(\d+)\s+\"([^\"]*)\"[^\n]*")
_LINE_DIRECTIVE = re.compile(r"\.(version|target|address_size)\s+([^\n]*)")
_SECTION = re.compile(r"\.section\s+[\w.$]+\s*\{.*?\}", re.S)
_HEADER = re.compile(r"((?:\.(?:visible|extern|weak|common)\s+)*)\.(entry|func)\b")
_NAME = re.compile(r"[\w$%.]+")
_REGISTER_RANGE = re.compile(r"([\w$%]+?)<(\d+)>$")
_DECLARATION = re.compile(
    r"(?:\.(?P<link>visible|extern|weak|common)\s+)?(?:\.(?P<space>global|const|shared|local|param)\s+)"
    r"(?P<rest>.*)$",
    re.S,
)
_NUMBER = re.compile(r"([+-]?)\s*(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)[uU]?$")
_FLOAT_BITS = re.compile(r"(-?)0([fFdD])([0-9a-fA-F]+)$")
_DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?$")


class _Parser:
    def __init__(self, text: str) -> None:
        self.raw_lines = text.split("\n")
        self.text = _COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)
        self.at = 0
        self.line = 1
        self.line_at = 0
        self.kernel = "?"
        self.functions: dict[str, Function] = {}
        self.variables: dict[str, Variable] = {}
        self.files: dict[int, str] = {}
        self.attributes = {"target": "", "version": ""}
        self.source: tuple[int, int] | None = None
        self.scope_count = 0

    def module(self) -> Module:
        while not self.skip_space():
            if self.directive():
                continue
            header = _HEADER.match(self.text, self.at)
            if header:
                self.function(header)
            else:
                self.module_variable()
        return Module(
            self.functions,
            self.variables,
            self.files,
            self.attributes["target"],
            self.attributes["version"],
            len(self.raw_lines),
        )

    # ---- the text and where we are in it -----------------------------------------------------------------------------

    def skip_space(self) -> bool:
        """Move to the next token; True at the end of the text."""
        found = _SPACE.match(self.text, self.at)
        if found:
            self.at = found.end()
        return self.at >= len(self.text)

    def current_line(self) -> int:
        self.line += self.text.count("\n", self.line_at, self.at)
        self.line_at = self.at
        return self.line

    def error(self, message: str, kind: ErrorKind = "syntax") -> PtxError:
        line = self.current_line()
        return PtxError(kind, message, kernel=self.kernel, line=line, text=self.raw_lines[line - 1].strip())

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def until(self, stop: str) -> str:
        end = self.text.find(stop, self.at)
        if end < 0:
            raise self.error(f"the text ends before {stop!r}")
        found = self.text[self.at : end]
        self.at = end + len(stop)
        return found

    def directive(self) -> bool:
        """Consume a directive that stands alone and may occur anywhere."""
        if self.text[self.at] != ".":
            return False
        if found := self.take(_LOC):
            self.source = (int(found[1]), int(found[2]))
        elif found := self.take(_FILE):
            self.files[int(found[1])] = found[2]
        elif found := self.take(_LINE_DIRECTIVE):
            self.attributes[found[1]] = found[2].strip()
        elif self.text.startswith(".pragma", self.at):
            self.until(";")
        elif not self.take(_SECTION):
            return False
        return True

    # ---- declarations ------------------------------------------------------------------------------------------------

    def module_variable(self) -> None:
        statement = self.until(";")
        for variable in self.declaration(statement):
            self.variables[variable.name] = variable

    def declaration(self, statement: str) -> list[Variable]:
        found = _DECLARATION.match(statement.strip())
        if not found:
            raise self.error(f"neither a function nor a variable: {statement.strip()[:80]!r}")
        return [self.variable(found["space"], found["rest"], is_extern=found["link"] == "extern")]

    def variable(self, space: str, text: str, *, is_extern: bool = False) -> Variable:
        declared, _, initial = text.partition("=")
        align, element, name, dimensions = 0, "", "", []
        for word in declared.replace("[", " [").split():
            if word == ".align":
                align = -1
            elif align == -1:
                align = int(word)
            elif word.startswith("."):
                if word[1:] in TYPE_BYTES:
                    element = word[1:]
                elif word[1:] in ("v2", "v4"):
                    dimensions.append(int(word[2:]))
                elif word[1:] not in ("ptr", "global", "const", "shared", "local", "generic", "attribute"):
                    raise self.error(f"unknown attribute {word} of a variable")
            elif word.startswith("["):
                dimensions.append(int(word.strip("[]") or "0", 0))
            elif not name:
                name = word
        if not element or not name:
            raise self.error(f"cannot read the declaration {declared.strip()!r}")
        nbytes = TYPE_BYTES[element]
        for count in dimensions:
            nbytes *= count
        data = self.initial_bytes(initial, element, nbytes) if initial else None
        return Variable(name, space, max(align, TYPE_BYTES[element]), nbytes, data, is_extern, element)

    def initial_bytes(self, text: str, element: str, nbytes: int) -> bytes:
        values = [word for word in re.split(r"[\s,{}]+", text) if word]
        data = bytearray()
        size = TYPE_BYTES[element]
        for word in values:
            operand = parse_operand(word)
            if not isinstance(operand, Immediate):
                raise self.error(f"initial value {word!r} is no number", "unsupported")
            if element in ("f32", "f64"):
                data += struct.pack("<f" if element == "f32" else "<d", operand.value)
            else:
                data += (int(operand.value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        if len(data) > nbytes:
            raise self.error(f"{len(data)} bytes of initial values for a variable of {nbytes}")
        return bytes(data.ljust(nbytes, b"\0"))

    # ---- functions ---------------------------------------------------------------------------------------------------

    def function(self, header: re.Match[str]) -> None:
        self.at = header.end()
        self.skip_space()
        returns = self.parameter_list() if self.text[self.at] == "(" else []
        self.skip_space()
        name = self.take(_NAME)
        if not name:
            raise self.error("a function without a name")
        self.kernel = name.group()
        function = Function(name.group(), header[2] == "entry", returns=returns)
        self.skip_space()
        if self.text[self.at] == "(":
            function.params = self.parameter_list()
        self.source = None
        end = re.compile(r"[^{;]*").match(self.text, self.at)
        assert end
        for word, value in re.findall(r"\.(maxntid|reqntid)\s+([\d, ]+)", end.group()):
            del word
            threads = 1
            for extent in value.split(","):
                threads *= int(extent)
            function.max_threads = threads
        self.at = end.end() + 1
        if self.text[self.at - 1] == ";":
            return
        self.body(function)
        self.functions[function.name] = function

    def parameter_list(self) -> list[Variable]:
        self.at += 1
        inside = self.until(")").strip()
        declared = []
        for text in inside.split(",") if inside else []:
            words = text.strip()
            space, _, rest = words.partition(" ")
            if not rest:
                space, _, rest = words.partition("\t")
            if space == ".reg":
                raise self.error("register parameters are not supported; the compiler passes .param", "unsupported")
            declared.append(self.variable("param", rest))
        return declared

    def body(self, function: Function) -> None:
        """Statements up to the closing brace. Names declared in an inner scope get the scope's number."""
        scopes: list[dict[str, str]] = [{}]
        while True:
            if self.skip_space():
                raise self.error("the text ends inside a function")
            letter = self.text[self.at]
            if letter == "{":
                self.at += 1
                self.scope_count += 1
                scopes.append(self.scope_labels())
            elif letter == "}":
                self.at += 1
                scopes.pop()
                if not scopes:
                    return
            elif letter == ";":
                self.at += 1
            elif not self.directive():
                self.statement(function, scopes)

    def scope_labels(self) -> dict[str, str]:
        """Labels of the scope that opens here: inline assembly may repeat them elsewhere."""
        depth, at = 1, self.at
        while depth:
            brace = re.compile(r"[{}]").search(self.text, at)
            if not brace:
                raise self.error("a brace is not closed")
            depth += 1 if brace.group() == "{" else -1
            at = brace.end()
        inside = self.text[self.at : at]
        return {
            name: f"{name}@{self.scope_count}"
            for name in re.findall(r"(?:^|[;{}\n])\s*([A-Za-z_$][\w$]*)\s*:(?!:)", inside)
        }

    def statement(self, function: Function, scopes: list[dict[str, str]]) -> None:
        label = self.take(_LABEL)
        if label:
            name = resolve(label[1], scopes)
            self.skip_space()
            if self.text.startswith(".branchtargets", self.at):
                self.at += len(".branchtargets")
                targets = self.until(";").replace(",", " ").split()
                function.branch_targets[name] = tuple(resolve(target, scopes) for target in targets)
            elif self.text.startswith(".callprototype", self.at):
                self.until(";")
            else:
                function.body.append(Label(name))
            return
        line = self.current_line()
        statement = self.until(";")
        text = " ".join(statement.split())
        if text.startswith(".reg"):
            self.declare_registers(text, function, scopes)
        elif text.startswith("."):
            for variable in self.declaration(text):
                name = variable.name
                if len(scopes) > 1:
                    scopes[-1][name] = name = f"{name}@{self.scope_count}"
                function.variables[name] = replace(variable, name=name)
        else:
            function.body.append(self.instruction(text, line, scopes, function.registers))

    def declare_registers(self, text: str, function: Function, scopes: list[dict[str, str]]) -> None:
        _, kind, names = text.split(None, 2)
        if kind[1:] not in TYPE_BYTES:
            raise self.error(f"register type {kind} is unknown", "unsupported")
        for declared in names.split(","):
            declared = declared.strip()
            counted = _REGISTER_RANGE.match(declared)
            plain = [f"{counted[1]}{i}" for i in range(int(counted[2]))] if counted else [declared]
            for name in plain:
                unique = name
                if len(scopes) > 1:
                    scopes[-1][name] = unique = f"{name}@{self.scope_count}"
                function.registers[unique] = kind[1:]

    def instruction(self, text: str, line: int, scopes: list[dict[str, str]], registers: dict[str, str]) -> Instruction:
        guard = None
        rest = text
        if text.startswith("@"):
            guard_text, _, rest = text.partition(" ")
            guard_text = guard_text[1:]
            negated = guard_text.startswith("!")
            guard = Register(resolve(guard_text.lstrip("!"), scopes), negated)
        opcode, _, operand_text = rest.strip().partition(" ")
        try:
            operands = tuple(
                rename(parse_operand(operand), scopes, registers) for operand in split_operands(operand_text)
            )
        except ValueError as error:
            raise self.error(str(error)) from None
        return Instruction(_parts(opcode), operands, guard, line, text, self.source)


def resolve(name: str, scopes: list[dict[str, str]]) -> str:
    """The unique name of what ``name`` means in the innermost scope that declares it."""
    for scope in reversed(scopes):
        if name in scope:
            return scope[name]
    return name


def rename(operand: Operand, scopes: list[dict[str, str]], registers: dict[str, str]) -> Operand:
    """Unique names throughout; a symbol that names a register (inline assembly needs no %) becomes one."""
    match operand:
        case Register(name, negated):
            return Register(resolve(name, scopes), negated)
        case Symbol(name, offset):
            unique = resolve(name, scopes)
            return Register(unique) if unique in registers else Symbol(unique, offset)
        case Address(base, offset) if base is not None:
            renamed = rename(base, scopes, registers)
            assert isinstance(renamed, Register | Symbol)
            return Address(renamed, offset)
        case Vector(items):
            return Vector(tuple(rename(item, scopes, registers) for item in items))
        case Pair(first, second):
            return Pair(rename(first, scopes, registers), rename(second, scopes, registers))
    return operand


@cache
def _parts(opcode: str) -> tuple[str, ...]:
    """Split at single dots: ``L1::no_allocate`` stays whole."""
    return tuple(opcode.split("."))


def split_operands(text: str) -> Iterator[str]:
    """Split at commas outside brackets and braces."""
    depth, start = 0, 0
    for at, letter in enumerate(text):
        if letter in "{[(":
            depth += 1
        elif letter in "}])":
            depth -= 1
        elif letter == "," and not depth:
            yield text[start:at].strip()
            start = at + 1
    if text.strip():
        yield text[start:].strip()


def parse_operand(text: str) -> Operand:
    """One operand. Raises ValueError when it is none."""
    if not text:
        raise ValueError("an operand is missing")
    first = text[0]
    if text == "_":
        return Sink()
    if first in "{(":
        return Vector(tuple(map(parse_operand, split_operands(text[1:-1]))))
    if first == "[":
        return _address(text[1:-1].strip())
    if first == "!":
        inner = parse_operand(text[1:].strip())
        if not isinstance(inner, Register | Symbol):
            raise ValueError(f"cannot negate {text!r}")
        return Register(inner.name, negated=True)
    if "|" in text:
        left, right = text.split("|")
        return Pair(parse_operand(left.strip()), parse_operand(right.strip()))
    if (number := _immediate(text)) is not None:
        return Immediate(number)
    if "+" in text:
        base, _, offset = text.partition("+")
        value = _immediate(offset.strip())
        if not isinstance(value, int):
            raise ValueError(f"cannot read the operand {text!r}")
        return Symbol(base.strip(), value)
    if not re.fullmatch(r"[\w$%.@]+", text):
        raise ValueError(f"cannot read the operand {text!r}")
    return Register(text) if first == "%" else Symbol(text)


def _immediate(text: str) -> int | float | None:
    if found := _FLOAT_BITS.match(text):
        pattern = "<f" if found[2] in "fF" else "<d"
        digits = found[3].rjust(8 if pattern == "<f" else 16, "0")
        value: float = struct.unpack(pattern, bytes.fromhex(digits)[::-1])[0]
        return -value if found[1] else value
    if found := _NUMBER.match(text):
        digits = found[2]
        base = 16 if digits[:2] in ("0x", "0X") else 2 if digits[:2] in ("0b", "0B") else 10
        if base == 10 and len(digits) > 1 and digits[0] == "0":
            base = 8
        number = int(digits, base)
        return -number if found[1] == "-" else number
    if _DECIMAL.match(text):
        return float(text)
    return None


def _address(text: str) -> Address:
    base_text, sign, offset_text = text, "", ""
    for letter in "+-":
        if letter in text[1:]:
            base_text, sign, offset_text = text.partition(letter)
            break
    offset = 0
    if offset_text:
        value = _immediate(offset_text.strip())
        if not isinstance(value, int):
            raise ValueError(f"cannot read the address [{text}]")
        offset = -value if sign == "-" else value
    base_text = base_text.strip()
    if (absolute := _immediate(base_text)) is not None:
        return Address(None, int(absolute) + offset)
    base = parse_operand(base_text)
    if not isinstance(base, Register | Symbol):
        raise ValueError(f"cannot read the address [{text}]")
    return Address(base, offset)
