import re
from math import inf, nan

import pytest
from pydantic import BaseModel

from bapo.cli import run
from bapo.config.errors import ConfigError
from bapo.config.placement import available_cores, placed
from bapo.config.recipe import COMMANDS, check, parse, read_recipe_for
from bapo.config.run import ADVANTAGE_NAMES, OBJECTIVE_NAMES, Config
from bapo.config.sections import renamed
from bapo.config.sft import SftConfig
from bapo.config.words import leaves
from bapo.core.settings import ClipSettings
from bapo.train.machine import resolve


def refused(values):
    with pytest.raises(ConfigError) as error:
        parse(Config, values, source="test")
    return str(error.value)


def test_defaults_are_possible_and_survive_json():
    config = Config()
    assert Config.model_validate_json(config.model_dump_json()) == config
    assert config.updates_per_step == 4


def test_names_are_those_of_the_core():
    from bapo.core.advantages import ADVANTAGES
    from bapo.core.objectives import OBJECTIVES

    assert tuple(OBJECTIVES) == OBJECTIVE_NAMES
    assert set(ADVANTAGE_NAMES) == set(ADVANTAGES)


def test_presets_and_overrides_make_clip_settings():
    assert parse(Config, {"objective": {"name": "bapo"}}, source="test").objective.clip == ClipSettings()
    weak = parse(Config, {"objective": {"preset": "weak-model", "used_low": 0.95}}, source="test").objective.clip
    assert (weak.target_share, weak.low, weak.measure, weak.used_low) == (0.45, (0.8, 0.9), "surrogate", 0.95)
    config = parse(Config, {"objective": {"target_share": 0.5, "high": [1.2, 2.4]}}, source="test")
    assert (config.objective.clip.measure, config.objective.clip.high) == ("gradient", (1.2, 2.4))
    script = parse(Config, {"objective": {"preset": "released-script"}}, source="test").objective.clip
    assert (script.low_step, script.order, round(script.target_share, 4)) == (0.05, "low_first", 0.3333)


def test_the_brake_is_the_default_for_any_number_of_passes():
    for reuse in (1, 4, 8, 12):
        objective = resolve(parse(Config, {"offpolicy": {"reuse": reuse}, "device": "cpu"}, source="test")).objective
        assert (objective.name, objective.sensor, objective.has_brake) == ("brake", "previous", True)
        assert objective.clip == ClipSettings(low=(0.8, 0.8), high=(1.2, 1.2), brake=0.03)
    stated = parse(Config, {"objective": {"options": {"delta": 0.1}}}, source="test").objective
    assert stated.clip.brake == 0.1


def test_the_keys_of_bapo_name_it():
    for keys in ({"preset": "paper"}, {"low": [0.7, 0.9]}, {"scope": "microbatch"}):
        objective = parse(Config, {"objective": keys}, source="test").objective
        assert objective == parse(Config, {"objective": {"name": "bapo", **keys}}, source="test").objective
    assert parse(Config, {}, source="test").objective.name == "brake"
    assert parse(Config, {"objective": {"sensor": "update"}}, source="test").objective.name == "brake"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"name": "bapo", "preset": "fixed"}, {"name": "grpo"}),
        ({"name": "bapo", "preset": "push-once", "scope": "microbatch"}, {"name": "push_once"}),
        ({"name": "gspo", "preset": "auto", "options": {"low": 0.9}}, {"name": "gspo", "options": {"low": 0.9}}),
        ({"name": "bapo", "preset": None, "low": [0.7, 0.9]}, {"name": "bapo", "low": [0.7, 0.9]}),
        ({"name": "bapo", "preset": "paper", "used_low": 1.0}, {"name": "bapo", "preset": "paper", "used_low": 1.0}),
        (
            {"name": "bapo", "preset": "fixed", "high": [1.2, 2.0], "options": {"dual_clip": 3.0}},
            {"name": "bapo", "low": [0.8, 0.8], "high": [1.2, 2.0], "options": {"dual_clip": 3.0}},
        ),
        (
            {"name": "bapo", "preset": "push-once", "remainder": "weigh", "target_share": 0.5},
            {"name": "bapo", "low": [0.8, 0.8], "high": [1.2, 1.2], "used_low": 1.0, "remainder": "weigh"}
            | {"target_share": 0.5},
        ),
    ],
)
def test_the_objective_of_an_earlier_version_has_one_name_of_today(old, new):
    assert Config.model_validate({"objective": renamed(old)}) == Config.model_validate({"objective": new})
    stated = Config().objective.model_dump(mode="json")  # a run states every key that there was
    stored = {key: value for key, value in stated.items() if key not in ("brake", "sensor")} | old
    assert Config.model_validate({"objective": renamed(stored)}) == Config.model_validate({"objective": new})


OWN = {"name": "data", "train": ["train.jsonl"], "test": ["test.jsonl"]}


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"offpolicy": {"resue": 2}}, ["offpolicy.resue is not a known key", "Did you mean offpolicy.reuse"]),
        (
            {"objective": {"target_share": 0.5, "low": [0.8, 0.8], "high": [1.2, 1.2]}},
            ["objective.target_share=0.5", "a single pair", "Give ranges to search"],
        ),
        ({"objective": {"preset": "push-once"}}, ["'push-once' is not a preset", 'objective.name = "push_once"']),
        ({"objective": {"preset": "fixed"}}, ["'fixed' is not a preset", 'Write objective.name = "grpo" instead']),
        (
            {"objective": {"name": "bapo", "preset": "auto"}},
            ["'auto' is not a preset", "the default is the objective brake"],
        ),
        ({"objective": {"name": "bapo", "preset": "none"}}, ["'none' is not a preset", "without a preset has"]),
        ({"objective": {"preset": None}}, ["objective.preset=none says of no objective what it is. Leave it out"]),
        ({"objective": {"preset": "papr"}}, ["objective.preset = 'papr': choose 'paper', 'weak-model'"]),
        ({"objective": {"options": {"delta": 0}}}, ["brake=0.0 must be a finite number of at least 1e-6"]),
        ({"objective": {"brake": 0.03, "used_low": 1.0}}, ["brake=0.03 and used_low=1.0 both set the lower bound"]),
        ({"objective": {"name": "grpo", "sensor": "update"}}, ["belongs to the brake", "objective.name='brake'"]),
        ({"objective": {"name": "brake", "brake": 0.03}}, ["objective.brake=0.03 belongs to objective.name='bapo'"]),
        (
            {"objective": {"name": "push_once", "preset": "paper"}},
            ["objective.preset='paper' belongs to objective.name='bapo'", "a recipe: --objective.preset none"],
        ),
        ({"objective": {"name": "auto"}}, ["objective.name='auto' is not known"]),
        (
            {"objective": {"name": "grpo", "used_low": 1.0}},
            ["objective.used_low=1.0 belongs to objective.name='bapo', not to 'grpo'", "objective.name = 'push_once'"],
        ),
        ({"lr": 1e-4}, ["lr is not a known key", "Did you mean learn.lr"]),
        ({"steps": 0}, ["steps = 0"]),
        ({"device": "gpu"}, ["device = 'gpu'", "'cuda'"]),
        ({"model": {"dtype": "float16"}}, ["model.dtype = 'float16'", "'bfloat16'"]),
        ({"rollout": {"responses": 1}}, ["rollout.responses = 1"]),
        (
            {"rollout": {"cache_tokens": 512, "max_tokens": 512}},
            ["rollout.cache_tokens=512 cannot hold one response", "rollout.max_tokens=512", "well above 512"],
        ),
        ({"model": {"lora": {"alpha": 16}}}, ["model.lora.alpha=16.0 does nothing with model.lora.rank=0"]),
        ({"model": {"lora": {"targets": ["q_proj"]}}}, ["model.lora.targets=['q_proj'] does nothing"]),
        ({"objective": {"name": "bappo"}}, ["objective.name='bappo'", "Did you mean 'bapo'"]),
        ({"objective": {"low": [0.9, 0.6]}}, ["not ordered"]),
        ({"learn": {"advantages": "grop"}}, ["learn.advantages='grop'", "Did you mean 'grpo'"]),
        ({"offpolicy": {"reuse": 8, "max_staleness": 4}}, ["8 updates on each rollout batch", "max_staleness >= 7"]),
        (
            {"offpolicy": {"replay_fraction": 0.5, "replay_max_age": 20}},
            ["replay_max_age=20 exceeds offpolicy.max_staleness=16"],
        ),
        ({"offpolicy": {"replay_fraction": 0.5, "replay_max_age": 3}}, ["Set replay_max_age >= 4"]),
        ({"offpolicy": {"replay_capacity": 20}}, ["Set replay_capacity >= 32"]),
        ({"offpolicy": {"partial_budget": 9, "partial_max_age": 0}}, ["none could ever be resumed"]),
        (
            {"objective": {"name": "grpo", "low": [0.5, 0.9]}},
            ["objective.low=(0.5, 0.9) belongs to objective.n"],
        ),
        ({"objective": {"name": "grpo", "preset": "paper"}}, ["objective.preset='paper' belongs to", "Leave it out"]),
        ({"seed": -1}, ["seed = -1"]),
        ({"name": "grpo"}, ["Did you mean task.name or objective.name?"]),
        ({"evall": {"k": 3}}, ["evall is not a known key. Did you mean eval?"]),
        ({"objective": {"low": 0.9}}, ["objective.low = 0.9: give a list, in brackets"]),
        ({"objective": "grpo"}, ["objective = 'grpo': give a table of keys"]),
        ({"steps": True}, ["steps = True: give a number, not a switch"]),
        ({"offpolicy": {"partial_budget": True}}, ["offpolicy.partial_budget = True: give a number"]),
        ({"learn": {"lr": False}}, ["learn.lr = False: give a number"]),
        ({"rollout": {"temperature": float("inf")}}, ["rollout.temperature = inf: "]),
        ({"objective": {"name": "grpo", "options": {"low": float("nan")}}}, ["objective.options.low = nan: "]),
        ({"offpolicy": {"partial_budget": 100, "partial_max_age": 15}}, ["partial_max_age=15 plus the 3 further"]),
        ({"learn": {"ess_reference": 1.5}}, ["learn.ess_reference = 1.5: give 1.0 or less"]),
        ({"learn": {"ess_reference": 0.0}}, ["learn.ess_reference = 0.0: give a number greater than 0"]),
        ({"learn": {"opsm": 0.0}}, ["learn.opsm = 0.0: give a number greater than 0"]),
        ({"learn": {"opsm": 0.1}, "objective": {"name": "asymre"}}, ["shifts every advantage"]),
        ({"learn": {"kl": 0.1, "kl_reference": "every 0"}}, ["kl_reference='every 0' names no", "such as 'every 64'"]),
        ({"learn": {"entropy_target": 0.2}}, ["learn.entropy_target=0.2 has no bonus", "Set learn.entropy,"]),
        ({"learn": {"kl_reference": "every 9"}}, ["learn.kl_reference='every 9' does nothing", "Set learn.kl,"]),
        ({"learn": {"kl": 0.1, "kl_mix": 0.6}}, ["learn.kl_mix=0.6 is for a reference that moves", "leave kl_mix out"]),
        (
            {"learn": {"kl": 0.1, "kl_reference": "every 9", "kl_mix": 0.6}, "model": {"lora": {"rank": 4}}},
            ["learn.kl_mix=0.6 mixes weights", "model.lora.rank=4", "Set learn.kl_mix=1"],
        ),
        ({"learn": {"opsm_on": "used"}}, ["learn.opsm_on='used' says which tokens learn.opsm masks", "Set it"]),
        ({"eval": {"also_at": [0.6, -1.0]}}, ["eval.also_at.1 = -1.0"]),
        (
            {"learn": {"advantages": "gdpo", "kl_in_reward": 0.1}, "task": {**OWN, "reward": "math,mine:brief"}},
            ["learn.kl_in_reward=0.1 changes the sum of the rewards", "set learn.kl"],
        ),
        (
            {"learn": {"advantages": "gdpo"}, "task": {**OWN, "reward_weights": [2.0], "overlong_tokens": 8}},
            ["task.overlong_tokens=8 changes the sum of the rewards", "name a function of the length"],
        ),
        (
            {"eval": {"also_at": [0.6, 1.0]}},
            ["eval.also_at=[0.6, 1.0]", "eval.temperature=1", "each temperature once"],
        ),
    ],
)
def test_impossible_configurations_say_which_keys_and_what_to_do(values, parts):
    message = refused(values)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": True}, "epochs = True: give a number, not a switch"),
        ({"learn": {"lr": True}}, "learn.lr = True: give a number, not a switch"),
        ({"seed": -1}, "seed = -1: "),
        ({"learn": {"lr": float("inf")}}, "learn.lr = inf: "),
        ({"learn": {"lr": 1e4}}, "learn.lr = 10000.0: "),
        ({"learn": {"clip_norm": float("inf")}}, "learn.clip_norm = inf: "),
        ({"learn": {"lr": 1.0, "weight_decay": 2.0}}, "learn.weight_decay=2 with learn.lr=1 changes"),
        ({"threads": -1}, "threads = -1: "),
        ({"model": {"lora": {"alpha": 16}}}, "model.lora.alpha=16.0 does nothing with model.lora.rank=0"),
        ({"device": "cpu", "learn": {"compile": True}}, "learn.compile=true is for CUDA"),
        ({"device": "cpu", "learn": {"offload_optimizer": True}}, "learn.offload_optimizer=true is for CUDA"),
    ],
)
def test_supervised_training_is_checked_as_strictly(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(SftConfig, values, source="test")


def test_shared_keys_mean_the_same_in_both_configurations():
    def described(section, prefix=""):
        for name, info in section.model_fields.items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
                yield from described(info.annotation, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", (info.annotation, info.metadata, info.description)

    ours, theirs = dict(described(Config)), dict(described(SftConfig))
    shared = ours.keys() & theirs.keys()
    assert {"seed", "out", "device", "threads", "checkpoint_keep", "learn.lr", "learn.compile", "model.path"} <= shared
    names = {"task.train", "task.test", "task.holdout", "task.prompt_column", "task.template"}
    names |= {"eval.every", "learn.warmup_updates"}
    assert names <= shared
    for key in shared - names - {"checkpoint_every"}:  # alike, but of other data and units
        assert ours[key] == theirs[key], key
    assert all(description for _, _, description in (ours | theirs).values())


def test_everything_wrong_is_listed_at_once():
    message = refused({"steps": 0, "learn": {"lr": -1}, "out": 3, "checkpoint_minutes": -1})
    assert all(key in message for key in ("steps", "learn.lr", "out", "checkpoint_minutes"))


def test_recipes_are_toml(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("steps = 7\n[objective]\nname = 'grpo'\n[objective.options]\nhigh = 1.3\n")
    config = parse(Config, read_recipe_for(COMMANDS[Config], recipe), source="recipe")
    assert (config.steps, config.objective.name, config.objective.options) == (7, "grpo", {"high": 1.3})
    recipe.write_text("steps = = 7")
    with pytest.raises(ConfigError, match="not valid TOML"):
        parse(Config, read_recipe_for(COMMANDS[Config], recipe), source="recipe")
    with pytest.raises(ConfigError, match=r"cannot read .*Check the path"):
        parse(Config, read_recipe_for(COMMANDS[Config], tmp_path / "nowhere.toml"), source="recipe")


def test_recipes_may_be_the_json_that_a_run_keeps(tmp_path):
    config = parse(Config, {"steps": 7, "objective": {"name": "bapo"}, "eval": {"also_at": [0, 0.6]}}, source="test")
    recipe = tmp_path / "config.json"
    recipe.write_text(config.model_dump_json())
    assert parse(Config, read_recipe_for(COMMANDS[Config], recipe), source="recipe") == config
    for text, reason in (("{", "not valid JSON"), ("[1]", "holds list, not keys")):
        recipe.write_text(text)
        with pytest.raises(ConfigError, match=reason):
            parse(Config, read_recipe_for(COMMANDS[Config], recipe), source="recipe")


def test_every_key_has_a_name():
    keys = list(leaves(Config))
    assert {"steps", "objective.name", "offpolicy.partial_budget", "learn.lr"} <= set(keys)
    assert len(keys) == len(set(keys))


def test_device_and_dtype_are_decided_once_and_kept():
    import torch

    from bapo.train.machine import resolve

    cuda = torch.cuda.is_available()
    config = resolve(Config())
    assert (config.device, config.model.dtype) == (("cuda", "bfloat16") if cuda else ("cpu", "float32"))
    assert config.threads > 0
    assert resolve(Config.model_validate_json(config.model_dump_json())) == config
    chosen = resolve(parse(Config, {"device": "cpu", "model": {"dtype": "bfloat16"}}, source="test"))
    assert (chosen.device, chosen.model.dtype) == ("cpu", "bfloat16")
    if not cuda:
        with pytest.raises(ConfigError, match=r"device='cuda', but torch sees no CUDA device.*device='cpu'"):
            resolve(parse(Config, {"device": "cuda"}, source="test"))


def test_what_is_left_open_is_decided_by_the_machine(monkeypatch):
    import torch

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for present, device, dtype in ((False, "cpu", "float32"), (True, "cuda", "bfloat16")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda present=present: present)
        assert placed("auto", "auto", 3) == (device, dtype, 3)
        assert placed("cpu", "auto", None) == ("cpu", "float32", available_cores())
        assert placed("cpu", "bfloat16", 0) == ("cpu", "bfloat16", available_cores())


@pytest.mark.parametrize("command", [["train"], ["eval", "--model", "demo", "--data", "countdown"]])
def test_a_device_that_is_not_there_is_refused_in_one_sentence(command, monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run([*command, "--device", "cuda"]) == 2
    assert capsys.readouterr().err == (
        "bapo: device='cuda', but torch sees no CUDA device on this machine. Use a machine that has one, with a CUDA "
        "build of torch, or start a new run with device='cpu'.\n"
    )


def test_what_needs_the_cuda_engine_is_refused_on_cpu():
    from bapo.train.build import build
    from bapo.train.machine import resolve

    keep = {"partial_cache": "keep", "partial_budget": 5000}
    config = parse(Config, {"device": "cpu", "offpolicy": keep}, source="test")
    with pytest.raises(ValueError, match=r"partial_cache='keep' needs the CUDA engine.*'rebuild'"):
        build(resolve(config))
    assert "keeps nothing without partial rollout" in refused({"offpolicy": {"partial_cache": "keep"}})
    assert "learn.compile=true is for CUDA" in refused({"device": "cpu", "learn": {"compile": True}})
    eight = {"rollout": {"precision": "fp8"}, "cluster": {"rollouts": 1, "engine": "vllm"}}
    assert "rollout.precision='fp8' is for our own engine, but cluster.engine='vllm'" in refused(eight)
    vllm = {"model": {"float32_head": True}, "cluster": {"rollouts": 1, "engine": "vllm"}}
    assert "model.float32_head=true, but cluster.engine='vllm'" in refused(vllm)
    offloaded = {"learn": {"offload_optimizer": True}, "model": {"lora": {"rank": 4}}}
    assert "is for all weights on one GPU, but model.lora.rank=4" in refused(offloaded)


def test_a_grid_is_no_recipe(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text('seeds = 2\n[[objective]]\nlabel = "grpo"\n')
    with pytest.raises(ConfigError, match=r"is a grid of runs, and not a recipe.*Run it with `bapo compare"):
        parse(Config, read_recipe_for(COMMANDS[Config], path), source="recipe")


def numbers(section=Config, prefix=""):
    """Every key of a configuration that is one number, with dots between tables."""
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from numbers(kind, f"{prefix}{name}.")
        elif {float, float | None} & {kind}:
            yield f"{prefix}{name}"


@pytest.mark.parametrize("value", [inf, -inf, nan], ids=str)
@pytest.mark.parametrize("key", sorted({*numbers(Config), *numbers(SftConfig)}))
def test_every_number_is_finite(key, value):
    assert "rollout.temperature" in set(numbers(Config))
    schema = Config if key in set(numbers(Config)) else SftConfig
    *tables, name = key.split(".")
    values = {name: value}
    for table in reversed(tables):
        values = {table: values}
    with pytest.raises(ConfigError, match=rf"{re.escape(key)} = {value}: give a finite number"):
        parse(schema, values, source="test")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learn": {"betas": [0.9, nan]}}, "learn.betas.1 = nan: give a finite number"),
        ({"learn": {"betas": [0.9, 1.0]}}, "learn.betas.1 = 1.0: give a number less than 1"),
        ({"eval": {"also_at": [inf]}}, "eval.also_at.0 = inf: give a finite number"),
        ({"objective": {"low": [0.8, nan]}}, "objective.low.1 = nan: give a finite number"),
        ({"objective": {"name": "grpo", "options": {"low": nan}}}, "objective.options.low = nan: give a finite number"),
        ({"task": {"overlong_penalty": 1e30}}, "task.overlong_penalty = 1e+30: give 1000000.0 or less"),
    ],
)
def test_lists_and_options_are_finite_too(values, message):
    assert message in refused(values)


def test_compiled_layers_are_refused_where_auto_finds_no_gpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for schema in (Config, SftConfig):
        config = parse(schema, {"learn": {"compile": True}}, source="test")
        with pytest.raises(
            ConfigError, match=r"learn\.compile=true is for CUDA, but device='auto' finds no CUDA device"
        ):
            resolve(config)


def test_a_cluster_is_refused_what_it_cannot_do():
    def cluster(**values):
        return {"cluster": {"rollouts": 2} | values}

    assert Config.model_validate(cluster()).cluster.on
    assert "does nothing with cluster.rollouts=0" in refused({"cluster": {"learners": 2}})
    told = refused(cluster(ahead=4))  # u = 4: 4 * 4 + 3
    assert "tokens grow 19 updates old" in told
    assert "max_staleness >= 19" in told
    assert Config.model_validate(cluster(ahead=4) | {"offpolicy": {"max_staleness": 19}})
    partial = {"offpolicy": {"partial_budget": 100}}
    assert "partial_budget=100 is for one process" in refused(cluster() | partial)
    assert "needs cluster.engine='vllm'" in refused(cluster(gpus_per_rollout=2))
    kept = {"rollout": {"cache_tokens": 4096}}
    assert "rollout.cache_tokens=4096 does nothing with cluster.engine='vllm'" in refused(cluster(engine="vllm") | kept)


def test_a_task_of_one_file_is_told_how_to_hold_out_a_part_of_it():
    told = "If all problems are in one place, set task.holdout = 0.1 instead of task.test."
    (only_train,) = check(Config, {"task": {"name": "data", "train": ["all.jsonl"]}})[1]
    assert "Set task.test, for example" in only_train
    assert told in only_train
    (only_test,) = check(Config, {"task": {"name": "data", "test": ["all.jsonl"]}})[1]
    assert "Set task.train, for example" in only_test
    assert told not in only_test


def test_a_name_whose_key_another_command_has_is_not_explained_by_it():
    (line,) = check(SftConfig, {"num_train_epochs": 3})[1]
    assert "rollout" not in line
    assert line.endswith("`bapo sft --help` lists all keys.")


def test_a_key_with_a_dot_in_its_name_belongs_into_a_table():
    assert "model.path is not a known key. Write path into the table model" in refused({"model.path": "x"})
    assert "In TRL" not in refused({"": 1})


@pytest.mark.parametrize(
    ("offpolicy", "told"),
    [
        ({"reuse": 2}, "tokens that were trained on before have a lower bound of 1"),
        ({"reuse": 1, "replay_fraction": 0.25}, "tokens that were trained on before have a lower bound of 1"),
        ({"reuse": 1}, "push once does nothing in this run: no token is trained on twice"),
    ],
)
def test_a_run_says_what_push_once_does_in_it(offpolicy, told):
    from bapo.train.build import clip_notes

    config = Config.model_validate({"objective": {"name": "push_once"}, "offpolicy": offpolicy})
    (note,) = clip_notes(resolve(config))
    assert told in note
    assert clip_notes(resolve(Config.model_validate({"offpolicy": {"reuse": 1}}))) == []
    options = {"name": "grpo", "options": {"used_low": 1.0}}
    assert told in clip_notes(resolve(Config.model_validate({"objective": options, "offpolicy": offpolicy})))[0]


@pytest.mark.parametrize("values", [{"threads": 100_000}, {"task": {"reward_workers": 10**9}}])
def test_more_threads_or_workers_than_any_machine_runs_are_refused(values):
    with pytest.raises(ConfigError, match="4096"):
        parse(Config, values, source="test")
