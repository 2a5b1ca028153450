"""Writes a policy as a directory that transformers and vLLM can load.

The directory holds the model that was trained: one plain model (low-rank additions merged into its weights), the
tokenizer with its chat template, and generation settings that name every stop token and sample as in training, at the
same temperature and from the whole distribution. The generation settings of the base model are not kept: a top-p or a
repetition penalty in them would change what others measure, and some cannot even be written back.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import GenerationConfig

from bapo.models.lora import merged_weights, save_adapter
from bapo.models.policy import Policy


def write_model(policy: Policy, run: Path, card: str, temperature: float, *, base: str) -> None:
    """Write model/ into the directory of a run, and low-rank additions separately into adapter/ as well."""
    save_policy(policy, run / "model", card=card, temperature=temperature)
    if policy.adapters is not None:
        save_additions(policy, run / "adapter", card=card, base=base)


def save_policy(
    policy: Policy,
    directory: Path,
    *,
    card: str,  # its README.md
    temperature: float = 1.0,
) -> None:
    """Write model, tokenizer, generation settings and card into the directory, completely or not at all."""
    partial = _fresh(directory)
    model, tokenizer = policy.model, policy.tokenizer
    own_settings = model.generation_config
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=sorted(policy.stop_ids),
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
    )
    try:
        weights = None if policy.adapters is None else merged_weights(model)
        model.save_pretrained(partial, state_dict=weights)
    finally:
        model.generation_config = own_settings
    tokenizer.save_pretrained(partial)
    (partial / "README.md").write_text(card)
    partial.rename(directory)


def save_additions(policy: Policy, directory: Path, *, card: str, base: str) -> None:
    """Write only the low-rank additions, completely or not at all. `base` is the model that they belong to."""
    assert policy.adapters is not None
    partial = _fresh(directory)
    save_adapter(policy.adapters, partial, base=base)
    (partial / "README.md").write_text(card)
    partial.rename(directory)


def _fresh(directory: Path) -> Path:
    """The directory to write to before renaming. What a killed process left behind is removed, and a link as such."""
    partial = directory.with_name(f"{directory.name}.partial")
    for leftover in (partial, directory):
        if leftover.is_symlink():
            leftover.unlink()
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir()
    return partial
