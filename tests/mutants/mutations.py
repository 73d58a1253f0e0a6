"""One-line bugs, each an edit of a few characters.

Excluded by rule: docstrings, strings, annotations, decorators, assertions, arguments of `raise`, f-strings (messages),
`__all__`, `__repr__`, code for type checkers, and branches for GPUs, which these tests do not have.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
}
_ANY_ORDER = ("isinstance", "issubclass", "getattr", "hasattr", "setattr", "equal", "isclose", "min", "max", "gcd")
_COUNTED = 8
"""Numbers up to this are indices and counts; higher numbers and fractions are settings."""


@dataclass(frozen=True)
class Mutant:
    """Replacement of a file's characters from `begin` to `end` by `text`."""

    file: str
    line: int
    begin: int
    end: int
    text: str
    what: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line} {self.what}"

    def planted(self, source: str) -> str:
        """Return the source with the bug."""
        return source[: self.begin] + self.text + source[self.end :]


def mutants(file: str, source: str) -> list[Mutant]:
    """Return all possible bugs of a file; each compiles."""
    found = [one for one in _Planter(file, source).mutants() if _compiles(one.planted(source))]
    return list(dict.fromkeys(found))


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class _Planter:
    """Walk over the syntax tree of one file."""

    def __init__(self, file: str, source: str) -> None:
        self._file, self._source = file, source
        lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._lines = lines

    def mutants(self) -> Iterator[Mutant]:
        yield from self._within(ast.parse(self._source))

    def _within(self, node: ast.AST) -> Iterator[Mutant]:
        for child in _mutable_children(node):
            yield from self._of(child)
            if not isinstance(child, ast.Raise):  # what it says is a message
                yield from self._within(child)

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                for before, op, after in zip([left, *others], ops, others, strict=False):
                    old, choices = _COMPARISONS[type(op)]
                    for new in choices:
                        yield from self._operator(before, after, old, new)
            case ast.BoolOp(op=op, values=values):
                old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                for before, after in zip(values, values[1:], strict=False):
                    yield from self._operator(before, after, old, new)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC and not _is_text(left, right):
                yield from self._operator(left, right, *_ARITHMETIC[type(op)])
            case ast.AugAssign(target=target, op=op, value=value) if type(op) in _ARITHMETIC:
                old, new = _ARITHMETIC[type(op)]
                yield from self._operator(target, value, f"{old}=", f"{new}=")
                yield self._replaced(node, "pass", "statement removed")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._replaced(node, f"({self._text(operand)})", "not removed")
            case ast.Constant(value=bool() as value):
                yield self._replaced(node, str(not value), f"{value} -> {not value}")
            case ast.Constant(value=int() | float() as value):
                for new in _others(value):
                    yield self._replaced(node, f"({new})" if new < 0 else str(new), f"{value} -> {new}")
            case ast.Return(value=ast.expr() as value) if not _is_none_or_false(value):
                yield self._replaced(node, "return None", "return None")
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield self._replaced(node, "pass", "statement removed")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.Raise():
                yield self._replaced(node, "pass", "statement removed")
            case ast.Continue() | ast.Break():
                yield self._replaced(node, "pass", f"{type(node).__name__.lower()} removed")
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) if _is_plain(test):
                yield self._replaced(test, f"(not {self._text(test)})", "condition negated")
            case ast.Call(func=ast.Name(id="min" | "max" as name) as func):
                new = "max" if name == "min" else "min"
                yield self._replaced(func, new, f"{name} -> {new}")
            case ast.Call(func=func, args=[first, second, *_]) if not _is_starred(first, second) and not _is_typed(
                func
            ):
                yield from self._swapped(first, second)

    def _swapped(self, first: ast.expr, second: ast.expr) -> Iterator[Mutant]:
        begin, end = self._span(first)[0], self._span(second)[1]
        if first.lineno == second.end_lineno:
            between = self._source[self._span(first)[1] : self._span(second)[0]]
            text = f"{self._text(second)}{between}{self._text(first)}"
            if text != self._source[begin:end]:
                yield Mutant(self._file, first.lineno, begin, end, text, "arguments swapped")

    def _operator(self, before: ast.expr, after: ast.expr, old: str, new: str) -> Iterator[Mutant]:
        """Yield the replacement of an operator between two operands, possibly among brackets and comments."""
        begin, end = self._span(before)[1], self._span(after)[0]
        at = self._source.find(old, begin, end)
        if at >= 0:
            line = self._source.count("\n", 0, at) + 1
            yield Mutant(self._file, line, at, at + len(old), new, f"{old} -> {new}")

    def _replaced(self, node: ast.expr | ast.stmt, text: str, what: str) -> Mutant:
        begin, end = self._span(node)
        return Mutant(self._file, node.lineno, begin, end, text, what)

    def _text(self, node: ast.expr) -> str:
        begin, end = self._span(node)
        return self._source[begin:end]

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        """Return the index of a character; columns of the syntax tree count bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())


def _mutable_children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the children in which a bug changes the program's behaviour."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _reachable(child)


def _reachable(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the node, or only the alternative of a GPU branch, because tests always take that."""
    if isinstance(node, ast.If | ast.IfExp) and "cuda" in ast.unparse(node.test):
        for other in node.orelse if isinstance(node, ast.If) else [node.orelse]:
            yield from _reachable(other)
    elif not _is_left_out(node):
        yield node


def _is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=func)) if _is_warning(func):
            return True
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return True
        case ast.ClassDef(bases=bases) if any(ast.unparse(base).startswith("Protocol") for base in bases):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.If(test=test):
            return ast.unparse(test) == "TYPE_CHECKING"
    return False


def _others(value: float) -> tuple[float, float]:
    """Return one more and one less, or twice and half of a setting, where a small change is no bug."""
    if value == int(value) and abs(value) <= _COUNTED:
        return value + 1, value - 1
    return value * 2, value // 2 if isinstance(value, int) else value / 2


def _is_warning(func: ast.expr) -> bool:
    return ast.unparse(func).startswith(("warnings.", "log.", "_log.", "logging."))


def _is_text(*operands: ast.expr) -> bool:
    return any(isinstance(one, ast.JoinedStr) or isinstance(getattr(one, "value", None), str) for one in operands)


def _is_none_or_false(value: ast.expr) -> bool:
    """Return whether the value is as false as None; another bug turns False into True."""
    return isinstance(value, ast.Constant) and (value.value is None or value.value is False)


def _is_plain(test: ast.expr) -> bool:
    """Return whether no other bug changes this condition."""
    return isinstance(test, ast.Name | ast.Attribute | ast.Call)


def _is_typed(func: ast.expr) -> bool:
    """Return whether swapped arguments would raise an error or make no difference."""
    return ast.unparse(func).rpartition(".")[2] in _ANY_ORDER


def _is_starred(*arguments: ast.expr) -> bool:
    return any(isinstance(one, ast.Starred) for one in arguments)
