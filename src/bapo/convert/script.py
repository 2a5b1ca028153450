"""Reads a script that trains with TRL's GRPOTrainer, without running it: its settings, its data, its reward functions.

Reward functions that stand in the script are copied into a module of their own, with what they need: to import the
script would be to run it.
"""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bapo.config.errors import ConfigError
from bapo.convert.literals import Binding, Call, Function, Reader, Scope, Undecided, dotted
from bapo.convert.settings import Setting, Unknown

POSITIONS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")
"""The first parameters of GRPOTrainer."""
CONFIGS, TRAINERS = ("GRPOConfig", "BapoConfig"), ("GRPOTrainer", "BapoTrainer")
UNCHANGED = {"shuffle", "with_format", "flatten_indices"}
"""Methods of a data set that keep its problems."""
MOVES = {"to", "cuda", "cpu", "half", "float", "bfloat16", "train", "eval"}
"""Methods of a model that return it."""
SHOWN = 60
"""How many characters of an expression are shown."""


@dataclass
class Script:
    """What a script says."""

    settings: list[Setting] = field(default_factory=list)
    rewards: str = ""
    """The text of a module with the reward functions that stand in the script; empty if there are none."""


def read_script(text: str, path: str, module: str) -> Script:
    """Read a script. `module`: the name that the module with its reward functions will have."""
    try:
        tree = ast.parse(text)
        reader = Reader(tree)
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno} is not valid Python: {error.msg}. Correct it.") from None
    except (ValueError, RecursionError, MemoryError):
        raise ConfigError(f"{path} cannot be read as Python. Give the script that calls GRPOTrainer.") from None
    trainers = [call for call in reader.calls if call.name.split(".")[-1].endswith(TRAINERS)]
    configs = [call for call in reader.calls if call.name.split(".")[-1].endswith(CONFIGS)]
    if not trainers and not configs:
        raise ConfigError(
            f"{path} calls neither GRPOConfig nor GRPOTrainer. Give a script that trains with TRL's GRPOTrainer, its "
            "settings as JSON or YAML, or a launch line of verl."
        )
    try:
        return _Reading(reader, text, module).script(trainers, configs)
    except RecursionError:
        raise ConfigError(f"{path} nests expressions too deeply to be read. Write them flat.") from None


class _Reading:
    """The reading of one script."""

    def __init__(self, reader: Reader, text: str, module: str) -> None:
        self.reader, self.lines, self.module = reader, text.splitlines(), module
        self.found = Script()
        self.lifted: dict[int, tuple[int, str]] = {}
        """Statements of the module with reward functions, by identity: line and text."""
        self.made: list[str] = []
        """Assignments of it that are not in the script."""

    def script(self, trainers: list[Call], configs: list[Call]) -> Script:
        """Everything that is there."""
        if len(trainers) > 1:
            lines = ", ".join(str(call.line) for call in trainers[1:])
            self._add("GRPOTrainer", Unknown(f"the one in line {trainers[0].line} was read, not that in {lines}"), 0)
        config = configs[0] if configs else None
        if trainers:
            config = self._trainer(trainers[0], config)
        if config is not None:
            self._words(config, "")
            self._assigned(config)
        self.found.settings.sort(key=lambda setting: setting.line)
        if self.lifted or self.made:
            parts = [text for _, text in sorted(self.lifted.values())]
            self.found.rewards = "\n\n\n".join([*parts, *self.made]) + "\n"
        return self.found

    def _trainer(self, call: Call, config: Call | None) -> Call | None:
        """Read the arguments of the trainer. Returns the call that makes its configuration."""
        given = dict(zip(POSITIONS, call.node.args, strict=False))
        given |= {word.arg: word.value for word in call.node.keywords if word.arg}
        for word in call.node.keywords:
            if word.arg is None:
                self._add("**", Unknown(_shown(word.value)), word.value.lineno)
        for name, value in given.items():
            at = (value, call.scope, call.line)
            match name:
                case "model":
                    self._model(*at)
                case "args":
                    config = self._config(*at) or config
                case "peft_config":
                    self._peft(*at)
                case "train_dataset" | "eval_dataset":
                    self._data(name, *at)
                case "reward_funcs":
                    self._rewards(*at)
                case _:
                    self._setting(name, *at)
        return config

    def _add(self, name: str, value: Any, line: int, note: str = "") -> None:
        self.found.settings.append(Setting(name, value, line, note))

    def _setting(self, name: str, value: ast.expr, scope: Scope, line: int) -> None:
        """Add a setting with its value, or as unknown."""
        self.reader.notes.clear()
        try:
            known = self.reader.literal(value, scope, line)
        except Undecided:
            known = Unknown(_shown(value))
        if name == "model_init_kwargs" and isinstance(known, dict):
            for inner, one in known.items():
                self._add(str(inner), one, value.lineno)
        else:
            self._add(name, known, value.lineno, "; ".join(sorted(self.reader.notes)))

    def _words(self, call: Call, prefix: str) -> None:
        """The keywords of a call as settings."""
        for position, value in enumerate(call.node.args):
            self._add(f"{prefix}argument {position + 1}", Unknown(_shown(value)), value.lineno)
        for word in call.node.keywords:
            if word.arg == "model_init_kwargs" and isinstance(word.value, ast.Dict | ast.Call):
                inner = word.value
                keys = inner.keys if isinstance(inner, ast.Dict) else [ast.Constant(w.arg) for w in inner.keywords]
                values = inner.values if isinstance(inner, ast.Dict) else [w.value for w in inner.keywords]
                for key, value in zip(keys, values, strict=True):
                    name = key.value if isinstance(key, ast.Constant) else word.arg
                    self._setting(str(name), value, call.scope, call.line)
            elif word.arg:
                self._setting(prefix + word.arg, word.value, call.scope, call.line)
            else:
                self._unpacked(word.value, call, prefix)

    def _unpacked(self, value: ast.expr, call: Call, prefix: str) -> None:
        try:
            known = self.reader.literal(value, call.scope, call.line)
        except Undecided:
            known = None
        if isinstance(known, dict):
            for name, one in known.items():
                self._add(f"{prefix}{name}", one, value.lineno)
        else:
            self._add(f"{prefix}**", Unknown(_shown(value)), value.lineno)

    def _assigned(self, config: Call) -> None:
        """What is set on the configuration after it was made."""
        names = {
            name
            for name, bindings in config.scope.bindings.items()
            if any(binding.value is config.node for binding in bindings)
        }
        for name, attribute, value, line, sure in config.scope.attributes:
            if name in names and sure:
                self._setting(attribute, value, config.scope, line)
            elif name in names:
                self._add(attribute, Unknown(f"{_shown(value)}, under a condition"), line)

    def _config(self, value: ast.expr, scope: Scope, line: int) -> Call | None:
        """The call that makes the configuration, if it can be found."""
        try:
            made, _ = self._call(value, scope, line)
        except Undecided:
            made = None
        call = next((call for call in self.reader.calls if call.node is made), None)
        if call is None or not call.name.split(".")[-1].endswith(CONFIGS):
            self._add("args", Unknown(_shown(value)), value.lineno)
            return None
        return call

    def _call(self, value: ast.AST | None, scope: Scope, line: int) -> tuple[ast.Call, Binding | None]:
        """The call that an expression is, or that a name was bound to."""
        binding = None
        for _ in range(20):
            if isinstance(value, ast.Call):
                if not isinstance(value.func, ast.Attribute) or value.func.attr not in MOVES:
                    return value, binding
                value = value.func.value
                continue
            if not isinstance(value, ast.Name):
                break
            binding, scope = self.reader.look_up(value.id, scope, line)
            value, line = binding.value, binding.line
        raise Undecided

    def _found(self, node: ast.Call) -> Call:
        return next(call for call in self.reader.calls if call.node is node)

    def _model(self, value: ast.expr, scope: Scope, line: int) -> None:
        """A name, or a model that `from_pretrained` or `get_peft_model` returns."""
        try:
            call = self._found(self._call(value, scope, line)[0])
        except Undecided:
            self._setting("model", value, scope, line)
            return
        first = call.node.args[0] if call.node.args else None
        words = {word.arg: word.value for word in call.node.keywords if word.arg}
        if call.name.endswith("get_peft_model"):
            self._model((words.pop("model") if "model" in words else first) or value, call.scope, call.line)
            config = words.pop("peft_config", call.node.args[1] if len(call.node.args) > 1 else None)
            if config is not None:
                self._peft(config, call.scope, call.line)
            else:
                self._add("peft_config", call.name, call.line)
            for name, given in words.items():
                self._setting(f"peft_config.{name}", given, call.scope, call.line)
        elif call.name.endswith(".from_pretrained"):
            path = next((words.pop(n) for n in ("pretrained_model_name_or_path", "model_name") if n in words), first)
            if path is not None:
                self._setting("model", path, call.scope, call.line)
            for name, given in words.items():
                self._setting(name, given, call.scope, call.line)
        else:
            self._setting("model", value, scope, line)

    def _peft(self, value: ast.expr, scope: Scope, line: int) -> None:
        try:
            call = self._found(self._call(value, scope, line)[0])
        except Undecided:
            call = None
        if call is not None and call.name.split(".")[-1] == "LoraConfig":
            self._add("peft_config", "LoraConfig", call.line)
            self._words(call, "peft_config.")
        elif not (isinstance(value, ast.Constant) and value.value is None):
            self._add("peft_config", Unknown(_shown(value)), value.lineno)

    # --- data ---

    def _data(self, name: str, value: ast.expr, scope: Scope, line: int) -> None:
        """Where problems come from, and what the script does to them before it trains."""
        if isinstance(value, ast.Constant) and value.value is None:
            return
        try:
            data = self._source(value, scope, line, None, 0)
        except Undecided:
            self._add(name, Unknown(_shown(value)), value.lineno)
            return
        if data.share is not None:
            if name == "train_dataset":
                self._add("test_size", data.share, value.lineno)
            else:
                return  # it is the other part
        note = f"the script changes it first, with {', '.join(data.changes)}" if data.changes else ""
        self._add(name, data.names, value.lineno, note)

    def _source(self, value: ast.AST | None, scope: Scope, line: int, split: Any, depth: int) -> _Data:
        if depth > 40:
            raise Undecided
        match value:
            case ast.Name():
                binding, where = self.reader.look_up(value.id, scope, line)
                part = split if binding.part is None else binding.part
                return self._source(binding.value, where, binding.line, part, depth + 1)
            case ast.Subscript():
                inner = self.reader.literal(value.slice, scope, line)
                if not isinstance(inner, str):
                    raise Undecided
                return self._source(value.value, scope, line, inner, depth + 1)
            case ast.Call(func=ast.Attribute(attr=method, value=base)) if not dotted(value.func).endswith(
                "load_dataset"
            ):
                if method == "train_test_split":
                    sizes = {word.arg: word.value for word in value.keywords}
                    share = self.reader.literal(sizes.get("test_size"), scope, line)
                    if not isinstance(share, float) or split not in ("train", "test", 0, 1):
                        raise Undecided
                    data = self._source(base, scope, line, None, depth + 1)
                    return _Data(data.names, data.changes, share)
                data = self._source(base, scope, line, split, depth + 1)
                shown = "" if method in UNCHANGED else f".{method}({_shown(value).partition(f'.{method}(')[2]}"
                return _Data(data.names, [*data.changes, *([shown] if shown else [])], data.share)
            case ast.Call() if dotted(value.func).endswith("load_dataset"):
                return _Data(self._loaded(value, scope, line, split), [], None)
        raise Undecided

    def _loaded(self, call: ast.Call, scope: Scope, line: int, split: Any) -> list[str]:
        """What `load_dataset` reads, by our names."""
        given = dict(zip(("path", "name", "data_dir", "data_files", "split"), call.args, strict=False))
        given |= {word.arg: word.value for word in call.keywords if word.arg}
        values = {
            name: self.reader.literal(given[name], scope, line)
            for name in ("path", "name", "data_files", "split")
            if name in given
        }
        path, name, files = values.get("path"), values.get("name"), values.get("data_files")
        chosen = values.get("split", split)
        if isinstance(chosen, list) and isinstance(split, int):
            chosen = chosen[split]
        if not isinstance(path, str) or not isinstance(chosen, str | None) or "[" in (chosen or ""):
            raise Undecided
        if files is not None:
            listed = files.get(chosen or "train") if isinstance(files, dict) else files
            if listed is None:
                raise Undecided
            return [listed] if isinstance(listed, str) else list(listed)
        return [":".join(part for part in (path, name, chosen or "train") if part)]

    # --- reward functions ---

    def _rewards(self, value: ast.expr, scope: Scope, line: int) -> None:
        try:
            names = list(self._named(value, scope, line))
        except Undecided as error:
            self._add("reward_funcs", Unknown(f"{_shown(value)}{f' ({error})' if str(error) else ''}"), value.lineno)
        else:
            self._add("reward_funcs", names, value.lineno)

    def _named(self, value: ast.AST | None, scope: Scope, line: int) -> Iterator[str]:
        """The reward functions of an expression, as module:function."""
        match value:
            case ast.List() | ast.Tuple():
                for item in value.elts:
                    yield from self._named(item, scope, line)
            case ast.Name():
                binding, where = self.reader.look_up(value.id, scope, line)
                if isinstance(binding.value, Function | ast.ClassDef):
                    self._lift(value.id, scope)
                    yield f"{self.module}:{value.id}"
                elif isinstance(binding.value, ast.ImportFrom) and not binding.value.level:
                    names = {alias.asname or alias.name: alias.name for alias in binding.value.names}
                    yield f"{binding.value.module}:{names[value.id]}"
                elif binding.value is not None and binding.part is None:
                    yield from self._named(binding.value, where, binding.line)
                else:
                    raise Undecided
            case ast.Attribute(value=ast.Name(id=module)):
                binding, _ = self.reader.look_up(module, scope, line)
                if not isinstance(binding.value, ast.Import):
                    raise Undecided
                names = {alias.asname or alias.name: alias.name for alias in binding.value.names}
                yield f"{names.get(module, module)}:{value.attr}"
            case ast.Lambda() | ast.Call():
                name = f"reward_{len(self.made) + 1}"
                text = f"{name} = {ast.unparse(value)}"
                for needed in _free_names(text):
                    self._lift(needed, scope)
                self.made.append(text)
                yield f"{self.module}:{name}"
            case ast.Constant(value=str()):
                raise Undecided("a reward model; a function may call it")
            case _:
                raise Undecided

    def _lift(self, name: str, scope: Scope) -> None:
        """Copy the statements that define a name, and those of the names in them."""
        where: Scope | None = scope
        while where is not None and name not in where.bindings:
            if name in where.parameters:
                raise Undecided(f"it needs {name!r}, a parameter")
            where = where.parent
        for binding in [] if where is None else where.bindings[name]:
            statement = binding.statement
            text = self._text(statement, name, inside=where is not self.reader.module)
            key = hash((id(statement), text)) if isinstance(statement, ast.Import | ast.ImportFrom) else id(statement)
            if key in self.lifted:
                continue
            self.lifted[key] = (statement.lineno, text)
            for needed in _free_names(ast.unparse(statement)):
                if needed != name and where is not None:
                    self._lift(needed, where)

    def _text(self, statement: ast.stmt, name: str, *, inside: bool) -> str:
        """A statement as it stands in the script; of an import, only this name."""
        if isinstance(statement, ast.Import | ast.ImportFrom):
            if getattr(statement, "level", 0):
                raise Undecided(f"it needs {name!r}, a relative import")
            kept = [a for a in statement.names if (a.asname or a.name.partition(".")[0]) == name]
            one = ast.Import(kept) if isinstance(statement, ast.Import) else ast.ImportFrom(statement.module, kept, 0)
            return ast.unparse(one)
        if inside or statement.col_offset:
            return ast.unparse(statement)
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
        return "\n".join(self.lines[first - 1 : statement.end_lineno])


@dataclass(frozen=True)
class _Data:
    names: list[str]
    changes: list[str]
    """What the script does to the rows."""
    share: float | None
    """The share that it holds out."""


def _free_names(text: str) -> list[str]:
    """The names that a statement takes from outside."""

    def names(table: symtable.SymbolTable) -> Iterator[str]:
        for symbol in table.get_symbols():
            if symbol.is_global() or (table.get_type() == "module" and symbol.is_referenced()):
                yield symbol.get_name()
        for child in table.get_children():
            yield from names(child)

    return sorted(set(names(symtable.symtable(text, "script", "exec"))))


def _shown(node: ast.AST) -> str:
    """An expression on one line, shortened."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
