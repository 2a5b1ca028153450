"""Writes a policy as a directory that transformers and vLLM can load.

The directory holds the model that was trained: one plain model (low-rank additions merged into its weights), the
tokenizer with its chat template, and generation settings that name every stop token and sample as in training: at the
same temperature, and with the same truncation if there was one. The generation settings of the base model are not kept:
a top-p or a repetition penalty in them would change what others measure, and some cannot even be written back.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import GenerationConfig

from bapo.models.layers import ADDITION, merged_weights
from bapo.models.policy import Policy


def write_model(policy: Policy, run: Path, card: str, sampling: Mapping[str, Any], *, base: str) -> None:
    """Write model/ into the directory of a run, and low-rank additions separately into adapter/ as well."""
    save_policy(policy, run / "model", card=card, **sampling)
    if policy.adapters is not None:
        save_additions(policy, run / "adapter", card=card, base=base)


def check_saves(policy: Policy) -> None:
    """Save tokenizer and configuration to a place that goes at once. ValueError if that fails: a run would fail so at
    its end.
    """
    with TemporaryDirectory() as scratch:
        for name, part in (("tokenizer", policy.tokenizer), ("config", policy.model.config)):
            try:
                part.save_pretrained(scratch)
            except Exception as error:
                raise ValueError(
                    f"the {name} of the model can be loaded and not saved ({type(error).__name__}: {error}), so a run "
                    "could not write its model at the end. Correct the model's tokenizer_config.json or config.json, "
                    "or use another model."
                ) from error


def save_policy(
    policy: Policy,
    directory: Path,
    *,
    card: str,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> None:
    """Write model, tokenizer, generation settings and card into the directory, completely or not at all."""
    model, tokenizer = policy.model, policy.tokenizer
    own_settings = model.generation_config
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=sorted(policy.stop_ids),
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        **({"min_p": min_p} if min_p else {}),
    )
    with _whole(directory, card) as partial:
        try:
            model.save_pretrained(partial, state_dict=None if policy.adapters is None else merged_weights(model))
        finally:
            model.generation_config = own_settings
        tokenizer.save_pretrained(partial)


def save_additions(policy: Policy, directory: Path, *, card: str, base: str) -> None:
    """Write only the low-rank additions, in peft's format, so that `PeftModel.from_pretrained(base, directory)` loads
    them. `base` is the model that they belong to.
    """
    policy.adapters.peft_config[ADDITION].base_model_name_or_path = base
    with _whole(directory, card) as partial:
        policy.adapters.save_pretrained(partial, save_embedding_layers=False)


@contextmanager
def _whole(directory: Path, card: str) -> Iterator[Path]:
    """A directory to write to, which gets its README.md and its name at the end, so that it is complete or not there.

    What a killed process left behind is removed, and a link as such.
    """
    partial = directory.with_name(f"{directory.name}.partial")
    for leftover in (partial, directory):
        if leftover.is_symlink():
            leftover.unlink()
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    yield partial
    (partial / "README.md").write_text(card)
    partial.rename(directory)
