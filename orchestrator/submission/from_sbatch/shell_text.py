"""Shell text as lines, simple commands and words that keep their quoting.

Only what a job script needs: quotes, substitutions, continuation lines, here-documents and nesting. `bash -n` has
accepted the text before, so this module need not report syntax errors.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_OPERATOR = re.compile(r"\d*(?:&>>?|>>|>&|>\||<<<|<<-?|<&|<>|[<>])|&&|\|\||\|&|;;&?|;&|[;&|()\n]")
_BLANK = re.compile(r"[ \t]+|\\\n")
_OPENS = frozenset({"if", "for", "while", "until", "case", "select", "{"})
_CLOSES = frozenset({"fi", "done", "esac", "}"})
_CONDITIONS = frozenset({*_OPENS, "[[", "[", "test"})
_BEFORE_COMMAND = frozenset({"then", "do", "else", "elif", "!", "time", *_OPENS})
"""Reserved words after which a command may begin."""
_HERE_DOCUMENT = re.compile(r"<<-?[ \t]*(\\?[\w.]+|'[^']+'|\"[^\"]+\")")
_VARIABLE = re.compile(r"\$\w+")
_REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_WITH_DEFAULT = re.compile(r"(?<!\\)\$\{(\w+):?[-=+]")
_SET_DEFAULT = re.compile(r"(?<!\\)\$\{(\w+):?=")
_OR_DEFAULT = re.compile(r"\$\{(\w+):?[-=].*\}", re.DOTALL)
_ARITHMETIC = re.compile(r"\$\(\(\s*(\d+)\s*([*/+-])\s*(\d+)\s*\)\)")
_NAME_REFERENCES = re.compile(r"(?<!\\)\$\{?#?(\w+)|\$\(\(([^()]*)\)\)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)


class Incomplete(ValueError):
    """The text ends within a quote or a substitution."""


class Token(NamedTuple):
    """Word or operator, as written. A redirection's target is a word of its own."""

    raw: str
    is_operator: bool = False

    @property
    def redirects(self) -> bool:
        """Return whether this is a redirection operator."""
        return self.is_operator and ("<" in self.raw or ">" in self.raw)


@dataclass(frozen=True, kw_only=True)
class ShellLine:
    """Command line of a script with its continuation lines; `number` is that of its first line."""

    number: int
    text: str
    tokens: tuple[Token, ...]
    is_nested: bool = False  # inside if, for, while, case, a function or a group, or the beginning of one
    has_document: bool = False  # a here-document follows it

    @property
    def words(self) -> list[str]:
        """Return the words as written, without operators."""
        return [token.raw for token in self.tokens if not token.is_operator]


def _skip_piece(text: str, at: int) -> int:
    """Return the end of the character, quote or substitution that begins at `at`. Raises Incomplete."""
    char, two = text[at], text[at : at + 2]
    if char == "\\":
        return at + 2
    if char == "'":
        return _index(text, "'", at + 1) + 1
    if char == '"':
        return _skip_until(text, at + 1, '"')
    if two == "$'":
        end = at + 2
        while text[end : end + 1] not in ("'", ""):
            end += 2 if text[end] == "\\" else 1
        return _index(text, "'", end) + 1
    if two in ("$(", "<(", ">("):
        return _skip_until(text, at + 2, ")", opens="(")
    if two == "${":
        return _skip_until(text, at + 2, "}")
    if name := _VARIABLE.match(text, at):
        return name.end()
    return _skip_until(text, at + 1, "`") if char == "`" else at + 1


def _skip_until(text: str, at: int, closing: str, opens: str = "") -> int:
    """Return the index after the closing character, which may not be inside a nested quote or substitution."""
    while at < len(text):
        if text[at] == closing:
            return at + 1
        if text[at] == "'" and closing == '"':  # no quote inside double quotes
            at += 1
        elif text[at] == opens:
            at = _skip_until(text, at + 1, closing, opens)
        else:
            at = _skip_piece(text, at)
    raise Incomplete(text)


def _index(text: str, char: str, start: int) -> int:
    found = text.find(char, start)
    if found < 0:
        raise Incomplete(text)
    return found


def pieces(text: str, *, quoted: bool = False) -> Iterator[str]:
    """Yield the quotes, substitutions and single characters of a word or text, as written. Raises Incomplete.

    `quoted`: the text is inside double quotes, where other quotes are plain characters.
    """
    at = 0
    while at < len(text):
        end = at + 1 if quoted and text[at] in "'\"" else _skip_piece(text, at)
        yield text[at:end]
        at = end


def tokenize(text: str) -> list[Token]:
    """Return the words and operators of shell text, without comments. Raises Incomplete."""
    found: list[Token] = []
    at = 0
    while at < len(text):
        if blank := _BLANK.match(text, at):
            at = blank.end()
        elif text[at] == "#":
            at = len(text) if (end := text.find("\n", at)) < 0 else end
        elif (operator := _OPERATOR.match(text, at)) and text[at : at + 2] not in ("<(", ">("):
            found.append(Token(operator[0], is_operator=True))
            at = operator.end()
        else:
            end = _word_end(text, at)
            found.append(Token(text[at:end]))
            at = end
    return found


def _word_end(text: str, at: int) -> int:
    start = at
    while at < len(text) and not _BLANK.match(text, at):
        if text[at] == "(" and text[at - 1] == "=" and at > start:  # an array
            at = _skip_until(text, at + 1, ")", opens="(")
        elif text[at] in ";&|()<>\n":
            break
        else:
            at = _skip_piece(text, at)
    return min(at, len(text))


def read_lines(text: str) -> list[ShellLine]:
    """Return the command lines of a script: comments and blank lines are left out."""
    physical, found, at = text.splitlines(), [], 0
    opened: list[str] = []
    while at < len(physical):
        number, line = at + 1, physical[at]
        at += 1
        while (tokens := _complete(line)) is None and at < len(physical):
            line = f"{line}\n{physical[at]}"
            at += 1
        documents = _HERE_DOCUMENT.findall(line) if any(t.is_operator and "<<" in t.raw for t in tokens or ()) else []
        for word in documents:
            end = word.strip("'\"\\")
            while at < len(physical) and physical[at].strip("\t") != end:
                at += 1
            at += 1
        if not tokens:
            continue
        nested = bool(opened) or tokens[0].raw in _CONDITIONS
        nested = _follow_nesting(opened, tokens) or bool(opened) or nested
        found.append(
            ShellLine(
                number=number, text=line, tokens=tuple(tokens), is_nested=nested, has_document=bool(documents)
            )  # fmt: skip
        )
    return found


def _complete(line: str) -> list[Token] | None:
    """Return the tokens of a line, or None if it continues on the next one."""
    if re.search(r"(?<!\\)(?:\\\\)*\\$", line):
        return None
    try:
        return tokenize(line)
    except Incomplete:
        return None


def _follow_nesting(opened: list[str], tokens: Sequence[Token]) -> bool:
    """Update the list of reserved words and parentheses that are open. Return whether a word opens any."""
    begins, opens = True, False
    for token in tokens:
        if token.is_operator:
            if token.raw == "(":
                opened.append(token.raw)
            elif token.raw == ")" and opened[-1:] == ["("]:  # not the end of a pattern of `case`
                opened.pop()
            begins = not token.redirects
        else:
            if begins and token.raw in _OPENS:
                opened.append(token.raw)
                opens = True
            elif begins and token.raw in _CLOSES and opened:
                opened.pop()
            begins = begins and token.raw in _BEFORE_COMMAND
    return opens


def simple_commands(tokens: Sequence[Token]) -> Iterator[tuple[str, list[Token]]]:
    """Yield each simple command with the operator that precedes it; redirections stay in it."""
    before = ""
    command: list[Token] = []
    for token in tokens:
        if token.is_operator and not token.redirects:
            if command:
                yield before, command
            before, command = token.raw, []
        else:
            command.append(token)
    if command:
        yield before, command


def unescape(inner: str) -> str:
    """Return the inside of a double-quoted word as text, with its references left in place."""
    return re.sub(r"\\(?:\n|([$`\"\\]))", r"\1", inner)


def unquote(raw: str) -> str | None:
    """Return the text of a word as bash would pass it, or None if bash expands something in it."""
    found: list[str] = []
    for piece in pieces(raw):
        if piece[0] == "'" and len(piece) > 1:
            found.append(piece[1:-1])
        elif piece[0] == '"' and len(piece) > 1:
            inner = re.sub(r"\\([$`\"\\\n])", lambda match: "\0" + match[1], piece[1:-1])
            if re.search(r"(?<!\0)[$`]", inner):
                return None
            found.append(inner.replace("\0\n", "").replace("\0", ""))
        elif piece[0] == "\\":
            found.append("" if piece[1:] == "\n" else piece[1:])
        elif piece[0] in "$`*?[{" or (piece == "~" and not found):
            return None
        else:
            found.append(piece)
    return "".join(found)


def expand(text: str, values: Mapping[str, str], *, quoted: bool = False) -> str:
    """Replace references to known variables, and arithmetic on two whole numbers.

    `${NAME:-TEXT}` is such a reference if NAME is known. `quoted`: the text is inside double quotes.
    """
    found = []
    for piece in pieces(text, quoted=quoted):
        if piece.startswith("$(("):
            named = re.sub(r"\$?\b([A-Za-z_]\w*)\b", lambda match: values.get(match[1], match[0]), piece)
            found.append(_ARITHMETIC.sub(_calculate, named))
        elif match := _REFERENCE.fullmatch(piece):
            found.append(values.get(match[1] or match[2], piece))
        elif match := _OR_DEFAULT.fullmatch(piece):
            found.append(values.get(match[1]) or piece)
        elif piece[0] == '"' and len(piece) > 1:
            found.append(f'"{expand(piece[1:-1], values, quoted=True)}"')
        else:
            found.append(piece)
    return "".join(found)


def _calculate(match: re.Match[str]) -> str:
    first, second = int(match[1]), int(match[3])
    if match[2] == "/":
        return str(first // second) if second else match[0]
    return str({"*": first * second, "+": first + second, "-": first - second}[match[2]])


def assignment(raw: str) -> tuple[str, str] | None:
    """Return the name and the raw value of an assignment word; None for any other word."""
    match = _ASSIGNMENT.fullmatch(raw)
    return (match[1], match[2]) if match else None


def references(text: str) -> set[str]:
    """Return the names of variables to which shell text refers, outside single quotes as far as bash would see them."""
    found: set[str] = set()
    for name, arithmetic in _NAME_REFERENCES.findall(text):
        found |= {name} if name else set(re.findall(r"[A-Za-z_]\w*", arithmetic))
    return found


def needed_references(text: str) -> set[str]:
    """Return the names of variables to which shell text refers without a default for an unset one."""
    return references(_WITH_DEFAULT.sub("", text))


def names_with_default(text: str) -> set[str]:
    """Return the names of variables for which shell text has a default: `${NAME:-TEXT}`."""
    return set(_WITH_DEFAULT.findall(text))


def names_set_to_default(text: str) -> set[str]:
    """Return the names of variables that shell text sets if they are unset: `${NAME:=TEXT}`."""
    return set(_SET_DEFAULT.findall(text))
