"""A folder of a stranger's: files with the names of modules, each of which leaves a mark when it runs."""

NAMES = (
    *("json", "re", "typing", "signal", "random", "socket", "pickle", "threading", "subprocess", "argparse", "struct"),
    *("multiprocessing", "numpy", "torch", "transformers", "tyro", "pydantic", "rich", "safetensors", "jinja2"),
    *("math_verify", "sympy", "latex2sympy2_extended", "reasoning_gym", "pip", "peft", "ray", "vllm", "wandb"),
    *("triton", "accelerate", "gguf", "datasets", "pyarrow", "kernels", "msgpack", "zmq", "cloudpickle", "psutil"),
)


def laid(directory, *more):
    """Fill the directory with them. Returns a function that says which have run."""
    marks = directory / "ran"
    marks.mkdir()
    for name in (*NAMES, *more):
        (directory / f"{name}.py").write_text(f"open({str(marks / name)!r}, 'w').close()\nraise SystemExit(9)\n")
    return lambda: sorted(mark.name for mark in marks.iterdir())
