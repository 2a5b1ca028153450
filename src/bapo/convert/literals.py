"""What a Python file says without being run: which names are bound where, and which expressions are literal.

A name has a value if the last statement before its use that binds it is certain to run. A default of argparse, of a
dataclass that a parser fills, or of a class counts as a value, and `Reader.notes` says so. Everything else raises
`Undecided`: conditions, loops, parameters, calls, lists that are changed later.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

DEEPEST = 40
"""How many names may lead to one another."""
LONGEST = 10_000
"""Most characters, or items, of a value."""
MOST = 100_000
"""How often names are looked up: `a = [b, b]`, `b = [c, c]` and so on would have no end."""
CHANGES_IT = {"append", "extend", "insert", "remove", "pop", "update", "setdefault", "clear", "sort", "reverse"}
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
PLAIN_CALLS: dict[str, Callable[..., Any]] = {
    **{"int": int, "float": float, "str": str, "min": min, "max": max, "len": len, "dict": dict},
    **{"Path": str, "pathlib.Path": str, "os.path.join": lambda *parts: "/".join(parts)},
}
"""Calls that are as good as literals."""
OF_TEXT = {"split", "rsplit", "strip", "lstrip", "rstrip", "lower", "upper", "removeprefix", "removesuffix"}
"""Methods of text that are, too."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Undecided(Exception):  # noqa: N818
    """Only a run would tell."""


@dataclass(frozen=True)
class Binding:
    """A statement that gives a name its value."""

    statement: ast.stmt
    """The statement of its scope in which it stands."""
    value: ast.AST | None
    """The expression, definition or import; None if there is no single one."""
    line: int
    sure: bool
    """Whether it runs whenever its scope does."""
    part: int | None = None
    """Which item of the value it is, in `a, b = value`."""


@dataclass(eq=False)
class Scope:
    """A module or a function."""

    parent: Scope | None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    """Names whose values are changed in place."""
    attributes: list[tuple[str, str, ast.expr, int, bool]] = field(default_factory=list)
    """`name.attribute = value`: name, attribute, value, line, and whether it is sure to run."""


@dataclass(frozen=True)
class Call:
    """A call, with where it stands."""

    node: ast.Call
    name: str
    scope: Scope
    line: int


class Reader:
    """A file, its scopes and its calls."""

    def __init__(self, tree: ast.Module) -> None:
        self.module = Scope(None)
        self.calls: list[Call] = []
        self.notes: set[str] = set()
        """How values were found that are not written where they are used."""
        self._looked_up = 0
        self._visit(tree.body, self.module, sure=True, top=None)
        self.parsed = {"args"} | {
            name
            for scope in {call.scope for call in self.calls} | {self.module}
            for name, bindings in scope.bindings.items()
            if any(isinstance(b.value, ast.Call) and "parse" in dotted(b.value.func).split(".")[-1] for b in bindings)
        }

    def look_up(self, name: str, scope: Scope, line: int) -> tuple[Binding, Scope]:
        """Where a name that is used in this line got its value."""
        self._looked_up += 1
        if self._looked_up > MOST:
            raise Undecided
        where: Scope | None = scope
        while where is not None:
            if name in where.changed:
                raise Undecided
            if found := where.bindings.get(name, []):
                before = [binding for binding in found if binding.line < line] if where is scope else found
                if not before or not before[-1].sure or (where is not scope and len(found) > 1):
                    raise Undecided
                return before[-1], where
            if name in where.parameters:
                raise Undecided
            where = where.parent
        raise Undecided

    def literal(self, node: ast.AST | None, scope: Scope, line: int, depth: int = 0) -> Any:
        """The value of an expression."""
        if depth > DEEPEST:
            raise Undecided
        try:
            value = self._literal(node, scope, line, depth + 1)
            if isinstance(value, str | list | dict) and len(value) > LONGEST:
                raise Undecided
        except (TypeError, ValueError, ArithmeticError, LookupError):
            raise Undecided from None
        return value

    def _literal(self, node: ast.AST | None, scope: Scope, line: int, depth: int) -> Any:
        def of(inner: ast.AST | None) -> Any:
            return self.literal(inner, scope, line, depth)

        match node:
            case ast.Constant(value=None | bool() | int() | float() | str()):
                return node.value
            case ast.List() | ast.Tuple():
                return [of(item) for item in node.elts]
            case ast.Dict():
                pairs = [(of(k), of(v)) if k else (None, of(v)) for k, v in zip(node.keys, node.values, strict=True)]
                return {k: v for key, value in pairs for k, v in (value.items() if key is None else [(key, value)])}
            case ast.UnaryOp(op=ast.USub()):
                return -of(node.operand)
            case ast.BinOp():
                return _computed(node.op, of(node.left), of(node.right))
            case ast.JoinedStr():
                return "".join(str(of(part)) for part in node.values)
            case ast.FormattedValue(conversion=-1, format_spec=None):
                return of(node.value)
            case ast.IfExp():
                return of(node.body if of(node.test) else node.orelse)
            case ast.Subscript():
                return of(node.value)[of(node.slice)]
            case ast.Name():
                binding, where = self.look_up(node.id, scope, line)
                value = self.literal(binding.value, where, binding.line, depth)
                return value if binding.part is None else value[binding.part]
            case ast.Attribute():
                return self._attribute(node, scope, line, depth)
            case ast.Call(func=ast.Attribute(attr=method, value=text)) if method in OF_TEXT and not node.keywords:
                return getattr(str, method)(of(text), *map(of, node.args))
            case ast.Call(func=func) if dotted(func) in PLAIN_CALLS:
                words = {word.arg: of(word.value) for word in node.keywords if word.arg}
                return PLAIN_CALLS[dotted(func)](*map(of, node.args), **words)
        raise Undecided

    def _attribute(self, node: ast.Attribute, scope: Scope, line: int, depth: int) -> Any:
        """`torch.bfloat16`, a default of a parser, or an attribute of a class."""
        if not isinstance(node.value, ast.Name):
            raise Undecided
        name, wanted = node.value.id, node.attr
        if any((name, wanted) == entry[:2] for entry in scope.attributes):
            raise Undecided
        if name in self.parsed:
            found = self._options().get(wanted)
            if found is None:
                raise Undecided
            shown, value = found
            self.notes.add(f"the default of {shown}")
            return self.literal(value, self.module, 1 << 30, depth)
        binding, where = self.look_up(name, scope, line)
        if isinstance(binding.value, ast.Import) and name == "torch":
            return wanted
        made = binding.value if isinstance(binding.value, ast.Call) else None
        if made is not None and isinstance(made.func, ast.Name) and not made.args:
            for word in made.keywords:
                if word.arg == wanted:
                    return self.literal(word.value, where, binding.line, depth)
            binding, where = self.look_up(made.func.id, where, binding.line)
        if not isinstance(binding.value, ast.ClassDef):
            raise Undecided
        values = dict(_fields(binding.value))
        self.notes.add(f"the default in {binding.value.name}")
        return self.literal(values[wanted], where, binding.line, depth)

    def _options(self) -> dict[str, tuple[str, ast.expr | None]]:
        """What a parser fills: options and their defaults, and the fields of dataclasses."""
        found: dict[str, tuple[str, ast.expr | None]] = {}
        for binding in (one for listed in self.module.bindings.values() for one in listed):
            if isinstance(binding.value, ast.ClassDef) and any(
                "dataclass" in ast.dump(d) for d in binding.value.decorator_list
            ):
                found |= {name: (f"--{name}", value) for name, value in _fields(binding.value)}
        for call in self.calls:
            if call.name.endswith(".add_argument"):
                found |= _option(call.node)
        return found

    def _visit(self, body: list[ast.stmt], scope: Scope, *, sure: bool, top: ast.stmt | None) -> None:
        """Record what the statements of a scope bind and call. `top`: the compound statement that they are in."""
        for statement in body:
            whole = top or statement
            for node in _expressions(statement):
                self._record(node, scope, statement.lineno)
                if isinstance(node, ast.NamedExpr):
                    _bind(scope, node.target, None, whole, statement.lineno, sure=False)
            match statement:
                case ast.Assign():
                    for target in statement.targets:
                        _bind(scope, target, statement.value, whole, statement.lineno, sure=sure)
                case ast.AnnAssign(value=ast.expr()):
                    _bind(scope, statement.target, statement.value, whole, statement.lineno, sure=sure)
                case ast.AugAssign() | ast.For() | ast.AsyncFor():
                    _bind(scope, statement.target, None, whole, statement.lineno, sure=False)
                case ast.Global() | ast.Nonlocal():
                    self.module.changed |= set(statement.names)
                case ast.Import() | ast.ImportFrom():
                    for alias in statement.names:
                        name = alias.asname or alias.name.partition(".")[0]
                        _bind(scope, ast.Name(name), statement, whole, statement.lineno, sure=sure)
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    _bind(scope, ast.Name(statement.name), statement, whole, statement.lineno, sure=sure)
            if isinstance(statement, Function):
                arguments = [node.arg for node in ast.walk(statement.args) if isinstance(node, ast.arg)]
                self._visit(statement.body, Scope(scope, parameters=set(arguments)), sure=True, top=None)
            elif isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test):
                self._visit(statement.body, scope, sure=sure, top=None)
            elif isinstance(statement, ast.ClassDef):
                self._visit(statement.body, Scope(scope), sure=True, top=None)
            else:
                for block in _blocks(statement):
                    self._visit(block, scope, sure=sure and isinstance(statement, ast.With), top=whole)

    def _record(self, node: ast.AST, scope: Scope, line: int) -> None:
        if not isinstance(node, ast.Call):
            return
        self.calls.append(Call(node, dotted(node.func), scope, line))
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if isinstance(owner, ast.Name) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES_IT:
            scope.changed.add(owner.id)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of such an expression; empty for others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else f".{node.attr}"
    return ""


def _computed(sign: ast.operator, left: Any, right: Any) -> Any:
    numbers = all(isinstance(value, int | float) for value in (left, right))
    added = isinstance(sign, ast.Add) and type(left) is type(right) and isinstance(left, str | list)
    too_large = isinstance(sign, ast.Pow) and numbers and (abs(left) > 1e6 or abs(right) > 64)
    if type(sign) not in OPERATORS or not (numbers or added) or too_large:
        raise Undecided
    return OPERATORS[type(sign)](left, right)


def _bind(scope: Scope, target: ast.expr, value: ast.AST | None, statement: ast.stmt, line: int, *, sure: bool) -> None:
    match target:
        case ast.Name():
            scope.bindings.setdefault(target.id, []).append(Binding(statement, value, line, sure))
        case ast.Tuple() | ast.List():
            for index, item in enumerate(target.elts):
                if isinstance(item, ast.Name):
                    found = Binding(statement, value, line, sure, index)
                    scope.bindings.setdefault(item.id, []).append(found)
        case ast.Attribute(value=ast.Name(id=name)) if isinstance(value, ast.expr):
            scope.attributes.append((name, target.attr, value, line, sure))
        case ast.Subscript(value=ast.Name(id=name)):
            scope.changed.add(name)


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """The expressions of a statement itself, without those of the statements in it."""
    for _, value in ast.iter_fields(statement):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.withitem):
                yield from ast.walk(item.context_expr)
            elif isinstance(item, ast.expr | ast.arguments | ast.keyword):
                yield from ast.walk(item)


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The blocks of a compound statement."""
    for name in ("body", "orelse", "finalbody"):
        yield getattr(statement, name, [])
    for inner in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
        yield inner.body


def _fields(definition: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    """The attributes of a class with their values, or the defaults of a dataclass."""
    for statement in definition.body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Call) and dotted(value.func).split(".")[-1] == "field":
            value = next((word.value for word in value.keywords if word.arg == "default"), None)
        yield from ((target.id, value) for target in targets if isinstance(target, ast.Name))


def _option(call: ast.Call) -> dict[str, tuple[str, ast.expr | None]]:
    """The name that an option has in the parsed arguments, with its default."""
    words = {word.arg: word.value for word in call.keywords}
    flags = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    flag = next((one for one in flags if one.startswith("--")), flags[0] if flags else "")
    chosen = words.get("dest")
    name = chosen.value if isinstance(chosen, ast.Constant) else flag.lstrip("-").replace("-", "_")
    default = words.get("default")
    action = words.get("action")
    if default is None and isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
        default = ast.Constant(action.value == "store_false")
    return {str(name): (flag, default)}
