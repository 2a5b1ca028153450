"""Reads a script that trains with TRL's GRPOTrainer, without running it: its settings, its data, its reward functions.

It goes through the statements from top to bottom, functions last, and keeps what every name is certain to be: a plain
value, a call with its arguments, a definition. What a parser fills has the value of a launch line, or else its default.
All else is `Unknown`: what is bound under a condition or in a loop, parameters, what is changed in place, and what only
a run would compute.

Reward functions that stand in the script are copied into a module of their own, with what they need: to import the
script would be to run it.
"""

from __future__ import annotations

import ast
import operator
import symtable
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bapo.config.errors import ConfigError
from bapo.convert.recipe import Setting, Unknown

CONFIGS, TRAINERS = ("GRPOConfig", "BapoConfig"), ("GRPOTrainer", "BapoTrainer")
MODELS, DATA = ("from_pretrained", "get_peft_model"), "load_dataset"
POSITIONS = {
    "Trainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    DATA: ("path", "name", "data_dir", "data_files", "split"),
    **dict.fromkeys(MODELS, ("model", "peft_config")),
}
"""The first parameters of what ends in these names."""
SAME = {"shuffle", "with_format", "to", "cuda", "half", "float", "bfloat16", "train", "eval"}
"""Methods that return the same problems, or the same model."""
CHANGES_IT = {"append", "extend", "insert", "remove", "pop", "update", "setdefault", "clear", "sort", "reverse"}
SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SHOWN, LONGEST, LAST = 60, 10_000, 1 << 30
"""How many characters of an expression are shown, how long a value may be, and a line after all others."""


class Undecided(Exception):  # noqa: N818
    """Only a run would tell."""


class Imported(str):
    """A module, or module:name."""


@dataclass(frozen=True)
class Value:
    """What an expression or a name is."""

    found: Any
    node: ast.AST
    note: str = ""
    """How it was found, if it is not written there."""
    statements: tuple[ast.stmt, ...] = ()
    """Those that bind the name; none for a parameter."""


Names = dict[str, Value]


@dataclass(frozen=True)
class Made:
    """What a call returns. Attributes that are set on it are arguments, too."""

    name: str
    node: ast.AST
    given: Names = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    """What the script does to a data set."""


def read_script(text: str, path: str, module: str, options: Mapping[str, Setting]) -> tuple[list[Setting], str]:
    """The settings of a script, and the text of a module with the reward functions that stand in it.

    `module`: the name which that module will have. `options`: what the script is started with.
    """
    try:
        return _Script(text, path, module, options).read()
    except ConfigError:
        raise
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno} is not valid Python: {error.msg}. Correct it.") from None
    except (ValueError, RecursionError, MemoryError):
        raise ConfigError(f"{path} cannot be read as Python. Give the script that calls GRPOTrainer.") from None


class _Script:
    def __init__(self, text: str, path: str, module: str, options: Mapping[str, Setting]) -> None:
        self.text, self.path, self.module, self.options = text, path, module, options
        self.made: list[tuple[Made, Names]] = []
        """Trainers and configurations."""
        self.later: list[tuple[ast.FunctionDef | ast.AsyncFunctionDef, Names]] = []
        """Functions that are still to be read."""
        self.parsed = {"args"}
        """Names of what a parser fills."""
        self.defaults: dict[str, ast.expr] = {}
        self.calls: dict[ast.Call, Made] = {}
        self.note = ""
        self.settings: list[Setting] = []
        self.copied: dict[str, int] = {}
        """Statements of the module with reward functions, and their lines."""

    def read(self) -> tuple[list[Setting], str]:
        """Everything that is there."""
        self._run(ast.parse(self.text).body, {})
        while self.later:
            function, around = self.later.pop(0)
            several = {name for name, value in around.items() if len(value.statements) > 1}  # which one counts?
            names = around | {name: replace(around[name], found=Unknown(name)) for name in several}
            for one in (one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)):
                names[one] = Value(Made("parse", function) if one in self.parsed else Unknown(one), function)
            self._run(function.body, names)
        if not self.made:
            raise ConfigError(
                f"{self.path} calls neither GRPOConfig nor GRPOTrainer. Give a script that trains with TRL's "
                "GRPOTrainer, its settings as JSON or YAML, or a launch line of verl."
            )
        trainers = [one for one in self.made if one[0].name.endswith(TRAINERS)] or self.made
        for name, value in trainers[0][0].given.items():
            self._argument(name, value, trainers[0][1])
        for other, _ in trainers[1:]:
            self._add(other.name, Unknown("another one, which was not read"), other.node)
        self.settings.sort(key=lambda setting: int(setting.where.rpartition(":")[2]))
        text = "\n\n\n".join(sorted(self.copied, key=lambda text: self.copied[text]))
        return self.settings, f"{text}\n" if text else ""

    # --- what names are ---

    def _run(self, body: list[ast.stmt], names: Names, *, sure: bool = True, whole: ast.stmt | None = None) -> None:
        """Take in statements. `whole`: the compound statement that they are in."""
        for node in body:
            top = whole or node
            for child in _expressions(node):
                if isinstance(child, ast.Call):
                    self._called(child, names, top)
            match node:
                case ast.Assign(value=bound) | ast.AnnAssign(value=ast.expr() as bound):
                    value = self._known(bound, names)
                    if not sure:
                        value = Value(Unknown(f"{_shown(value.node)}, under a condition"), value.node)
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        self._bind(target, value, names, top)
                case ast.AugAssign() | ast.For() | ast.AsyncFor():
                    self._bind(node.target, Value(Unknown(_shown(node.target)), node), names, top)
                case ast.Import() | ast.ImportFrom():
                    module = getattr(node, "module", None)
                    for one in node.names:
                        value = Value(Imported(f"{module}:{one.name}" if module else one.name), node)
                        self._bind(ast.Name(one.asname or one.name.partition(".")[0]), value, names, top)
                case ast.Global() | ast.Nonlocal():
                    names |= {name: Value(Unknown(name), node) for name in node.names}
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    self._bind(ast.Name(node.name), Value(node if sure else Unknown(node.name), node), names, top)
            if isinstance(node, ast.ClassDef):
                self.defaults |= _fields(node) if node.decorator_list else {}
                self._run(node.body, dict(names))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.later.append((node, names))
            else:
                as_script = isinstance(node, ast.If) and "__name__" in ast.dump(node.test)
                certain = sure and (as_script or isinstance(node, ast.With))
                self._run(list(_statements(node)), names, sure=certain, whole=whole if as_script else top)

    def _called(self, call: ast.Call, names: Names, top: ast.stmt) -> None:
        """Take in a call: a trainer, a configuration, an option, or a change."""
        name = _last(call.func)
        if name.endswith((*TRAINERS, *CONFIGS)):
            self.made.append((self._known(call, names).found, names))
        elif name == "add_argument" and call.args:
            words = {word.arg: word.value for word in call.keywords}
            default = words.get("default", ast.Constant(False) if "store_true" in ast.dump(call) else ast.Name(""))
            self.defaults[ast.unparse(call.args[-1]).strip("'-").replace("-", "_")] = default
        elif isinstance(call.func, ast.Attribute) and name in CHANGES_IT:
            self._bind(call.func.value, Value(Unknown(_shown(call.func.value)), call), names, top)

    def _bind(self, target: ast.AST, value: Value, names: Names, top: ast.stmt) -> None:
        match target:
            case ast.Tuple() | ast.List():
                for index, item in enumerate(target.elts):
                    self._bind(item, replace(value, found=_item(value.found, index)), names, top)
            case ast.Name(id=name):
                before = names[name].statements if name in names else ()
                names[name] = replace(value, statements=(*before, top))
                self.parsed |= {name} if _parsed(value.found) else set()
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner in names:
                if isinstance(made := names[owner].found, Made):
                    made.given[name] = value
            case ast.Subscript(value=ast.Name(id=name)):
                self._bind(target.value, Value(Unknown(name), value.node), names, top)

    def _known(self, node: ast.AST, names: Names) -> Value:
        """What an expression is, or that it is unknown."""
        self.note = ""
        try:
            return Value(self._value(node, names), node, self.note)
        except (Undecided, TypeError, ValueError, ArithmeticError, LookupError):
            return Value(Unknown(_shown(node)), node)

    def _value(self, node: ast.AST, names: Names) -> Any:
        def of(inner: ast.AST) -> Any:
            return self._value(inner, names)

        found: Any = Unknown("")
        match node:
            case ast.Constant(value=None | bool() | int() | float() | str()):
                found = node.value
            case ast.List() | ast.Tuple():
                found = [of(item) for item in node.elts]
            case ast.Dict() if None not in node.keys:
                pairs = zip(node.keys, node.values, strict=True)
                found = {str(of(key)): self._known(value, names) for key, value in pairs if key}
            case ast.UnaryOp(op=ast.USub()):
                found = -of(node.operand)
            case ast.BinOp():
                left, right = of(node.left), of(node.right)
                if isinstance(node.op, ast.Add) or not {type(left), type(right)} & {str, list}:
                    found = SIGNS[type(node.op)](left, right)
            case ast.JoinedStr():
                found = "".join(str(_plain(of(part))) for part in node.values)
            case ast.FormattedValue(conversion=-1, format_spec=None):
                found = of(node.value)
            case ast.Subscript():
                found = _item(of(node.value), of(node.slice))
            case ast.Name():
                self.note = names[node.id].note or self.note
                found = names[node.id].found
            case ast.Attribute():
                found = self._attribute(of(node.value), node.attr, names)
            case ast.Lambda():
                found = node
            case ast.Call():
                found = self._call(node, names)
        if isinstance(found, Unknown) or (isinstance(found, str | list) and len(found) > LONGEST):
            raise Undecided
        return found

    def _attribute(self, owner: Any, name: str, names: Names) -> Any:
        """What an attribute was set to, what a parser fills it with, or what it is in a class."""
        if isinstance(owner, Imported):
            return Imported(f"{owner}{'.' if ':' in owner else ':'}{name}")
        if isinstance(owner, Made) and name in owner.given:
            return owner.given[name].found
        if _parsed(owner) and name in self.options:
            self.note = f"--{name} of {self.options[name].where}"
            return self.options[name].value
        definition = names[owner.name].found if isinstance(owner, Made) and owner.name in names else owner
        self.note = f"the default of --{name}" if _parsed(owner) else f"the default in {_last(definition)}"
        return self._value((self.defaults if _parsed(owner) else _fields(definition))[name], names)

    def _call(self, call: ast.Call, names: Names) -> Any:
        """What a call returns."""
        name, base = _last(call.func), None
        if isinstance(call.func, ast.Attribute):
            base = self._known(call.func.value, names).found
        if isinstance(base, Made) and name in SAME:
            return base
        given: Names = {}
        positions = next((POSITIONS[end] for end in POSITIONS if name.endswith(end)), ())
        positions += tuple(f"argument {n + 1}" for n in range(len(positions), len(call.args)))
        for key, node in (*zip(positions, call.args, strict=False), *((one.arg, one.value) for one in call.keywords)):
            value = self._known(node, names)
            given |= {key: value} if key else value.found if isinstance(value.found, dict) else {"**": value}
        if isinstance(base, Made) and base.name == DATA:
            change = _shown(ast.Call(ast.Name(f".{name}"), call.args, call.keywords))
            share = {"test_size": given["test_size"]} if name == "train_test_split" else {}
            return replace(base, given=base.given | share, changes=(*base.changes, *([] if share else [change])))
        return given if name == "dict" else self.calls.setdefault(call, Made(name, call, given))

    # --- settings ---

    def _add(self, name: str, value: Any, node: ast.AST, note: str = "") -> None:
        self.settings.append(Setting(name, value, f"{self.path}:{getattr(node, 'lineno', 0)}", note))

    def _argument(self, name: str, value: Value, names: Names) -> None:
        """An argument of a trainer, or of what it is given."""
        found, node = value.found, value.node
        inside = found.given if isinstance(found, Made) else found if isinstance(found, dict) else {}
        kind = found.name if isinstance(found, Made) else ""
        of_options = _parsed(found) or any(_parsed(one.found) for one in inside.values())
        opened = kind.endswith((*CONFIGS, "LoraConfig")) or (name == "model" and kind in MODELS)
        try:
            if name == "reward_funcs":
                several = found if isinstance(found, list) else [found]
                self._add(name, [self._function(one, names) for one in several], node)
            elif kind == DATA:
                self._data(name, found, node)
            elif of_options or opened or (inside and name == "model_init_kwargs"):
                if kind == "LoraConfig":
                    self._add(name, kind, node)
                elif of_options and not self.options:  # training_args, get_peft_config(model_args)
                    self._add(name, Unknown(_shown(node), "give its launch line, too"), node)
                for one, inner in inside.items():
                    if not _parsed(inner.found):
                        self._argument("model" if one.startswith(("model_name", "pretrained")) else one, inner, names)
            elif name != "eval_dataset" or found is not None:
                self._add(name, _plain(found), node, value.note)
        except Undecided as error:
            self._add(
                name, found if isinstance(found, Unknown) else Unknown(_shown(node), str(error) or Unknown.why), node
            )

    def _data(self, name: str, data: Made, node: ast.AST) -> None:
        """Where problems come from, and what the script does to them before it trains."""
        given = {key: _plain(value.found) for key, value in data.given.items()}
        path, split, files = given["path"], given.get("split") or "train", given.get("data_files")
        if isinstance(files, dict):
            files = files[split]
        if not isinstance(split, str) or "[" in split:
            raise Undecided(f"{path} {split}: a part of a split has no name here")
        if "test_size" in given:
            self._add("test_size", given["test_size"], node)
        note = f"the script changes it first, with {', '.join(data.changes)}" if data.changes else ""
        named = ":".join(part for part in (path, given.get("name"), split) if part)
        self._add(name, [files] if isinstance(files, str) else files or [named], node, note)

    # --- reward functions ---

    def _function(self, found: Any, names: Names) -> str:
        """A reward function as module:function."""
        if isinstance(found, Imported):
            return str(found)
        name, text = getattr(found, "name", ""), ""
        if isinstance(found, str):
            raise Undecided("a reward model: a function may call it")
        if isinstance(found, Made | ast.Lambda):
            name = f"reward_{1 + list(self.copied.values()).count(LAST)}"
            text = f"{name} = {ast.unparse(found.node if isinstance(found, Made) else found)}"
            self._copy(_free(text), names)
            self.copied[text] = LAST
        elif name:
            self._copy({name}, names)
        else:
            raise Undecided
        return f"{self.module}:{name}"

    def _copy(self, needed: set[str], names: Names) -> None:
        """Copy the statements that bind these names, and those of the names in them."""
        for name in sorted(needed & names.keys()):
            if not names[name].statements:
                raise Undecided(f"it needs {name!r}, a parameter")
            for statement in names[name].statements:
                if getattr(statement, "level", 0):
                    raise Undecided(f"it needs {name!r}, a relative import")
                first = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", []))])
                text = "\n".join(self.text.splitlines()[first - 1 : statement.end_lineno])  # with its comments
                text = ast.unparse(statement) if statement.col_offset else text
                if text not in self.copied:
                    self.copied[text] = first
                    self._copy(_free(text) - {name}, names)


def _plain(found: Any, left: list[int] | None = None) -> Any:
    """A value that a setting may have. `left`: how many values it may still hold; names can say much with little."""
    left = left or [LONGEST]
    left[0] -= 1
    if left[0] < 0:
        raise Undecided
    if isinstance(found, list):
        return [_plain(one, left) for one in found]
    if isinstance(found, dict):
        return {key: _plain(one.found, left) for key, one in found.items()}
    if isinstance(found, Imported) and found.startswith("torch:"):
        return found.removeprefix("torch:")
    if isinstance(found, Imported) or not isinstance(found, bool | int | float | str | None):
        raise Undecided
    return found


def _parsed(found: Any) -> bool:
    return isinstance(found, Made) and "parse" in found.name


def _item(found: Any, key: Any) -> Any:
    """`found[key]`. Of what a parser fills, every item is one more; of a data set, it is a split."""
    match found:
        case Made(given={"test_size": _}) if key in (0, "train"):
            return found
        case Made(name="load_dataset", given=given) if "test_size" not in given:
            split = _plain(given["split"].found)[key] if "split" in given else key
            return replace(found, given={**given, "split": Value(split, found.node)})
        case Made() if _parsed(found):
            return Made(found.name, found.node)
        case Made(name="from_pretrained") if key == 0:  # model, tokenizer = …
            return found
        case list() | dict() if isinstance(found, dict) or key < len(found):
            return found[str(key)].found if isinstance(found, dict) else found[key]
    return Unknown(str(key))


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements that a compound statement holds."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from _statements(child)


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions of a statement itself, without those of the statements in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr | ast.arguments | ast.keyword | ast.withitem):
            yield from ast.walk(child)


def _last(node: Any) -> str:
    """The last part of a dotted name."""
    return str(getattr(node, "attr", getattr(node, "id", getattr(node, "name", ""))))


def _fields(definition: Any) -> dict[str, ast.expr]:
    """The attributes of a class with their values, or the defaults of a dataclass."""
    found: dict[str, ast.expr] = {}
    for statement in definition.body if isinstance(definition, ast.ClassDef) else ():
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Call) and _last(value.func) == "field":
            value = next((word.value for word in value.keywords if word.arg == "default"), None)
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        found |= {target.id: value for target in targets if isinstance(target, ast.Name) and value is not None}
    return found


def _free(text: str) -> set[str]:
    """The names that statements take from outside."""
    found, tables = set[str](), [symtable.symtable(text, "script", "exec")]
    while tables:
        table = tables.pop()
        outside = (
            s for s in table.get_symbols() if s.is_global() or (table.get_type() == "module" and s.is_referenced())
        )
        found |= {symbol.get_name() for symbol in outside}
        tables += table.get_children()
    return found


def _shown(node: ast.AST) -> str:
    """An expression on one line, shortened."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
