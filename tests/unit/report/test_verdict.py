"""What stands on top of a report: the verdict, the differences behind it, and signs of trouble."""

import json
import shutil

import pytest

from bapo.compare import write_json
from bapo.report import contents, find_arms
from bapo.report.arms import arms_of
from bapo.report.verdict import places, signs
from bapo.runs.read import Run, read_run
from tests.compared_runs import COMPARED

ONE = COMPARED / "reuse-4/bapo/seed-0"
FEW = "The scores are from only 4 held-out problems. Fewer than 100 are few"
DOUBT = "over all problems of this kind, a score may be up to"
ALL_THE_SAME = "Intervals over seeds leave this out, because every seed has the same problems."


def rewritten(run, change):
    """Change the last evaluation of a run directory, in its log and in its summary."""
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    change(log[-1])
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"after": log[-1]}))


def copied(source, path, avg, seed):
    """A run of another seed with another score."""
    shutil.copytree(source, path)
    rewritten(path, lambda line: line.update({"eval/avg": avg}))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"seed": seed}))


@pytest.fixture
def grid(tmp_path):
    """Three seeds of grpo (.1 .2 .3), then bapo (.2 .35 .4) and clip_higher (.1), as `bapo compare` lays them out."""
    scores = {"grpo": (0.1, 0.2, 0.3), "bapo": (0.2, 0.35, 0.4), "clip_higher": (0.1,)}
    sources = {name: f"reuse-{2 if name == 'grpo' else 4}/{name}/seed-0" for name in scores}
    record = {"name": "g", "settings": ["s"], "objectives": list(scores), "seeds": [0, 1, 2], "runs": []}
    for name, listed in scores.items():
        for seed in range(3):
            record["runs"].append({"setting": "s", "objective": name, "seed": seed, "path": f"s/{name}/seed-{seed}"})
            if seed < len(listed):
                copied(COMPARED / sources[name], tmp_path / "g" / "s" / name / f"seed-{seed}", listed[seed], seed)
    write_json(tmp_path / "g/grid.json", record)
    return tmp_path / "g"


def top(path):
    values = contents(find_arms([path]))
    return values["verdict"], values["differences"]


def test_the_report_says_what_compare_prints(grid):
    """.1 .15 .1 over three seeds: .117 ± .072 (4.3027 · .028868 / √3), against the first objective of the grid."""
    verdict, differences = top(grid)
    assert verdict["lines"] == [
        "bapo beats grpo (+0.117 ± 0.072 avg@2 over 3 seeds); clip_higher has too few seeds to be compared with it "
        "(+0.000 over 1 seed)."
    ]
    exam, missing = verdict["notes"][-2:]
    assert exam.startswith(f"{FEW}: {DOUBT} 0.")
    assert exam.endswith(ALL_THE_SAME)
    assert missing == "2 runs are not finished, so this may change."
    assert verdict["tone"] == "decided"
    (table,) = differences
    assert table["headings"][:3] == ["", "seeds", "avg@2"]
    assert [row[:3] for row in table["rows"]] == [["bapo - grpo", "3", "+0.117 ± 0.072*"]]


def test_the_record_of_a_grid_may_be_damaged(grid):
    for record in ({"runs": 3}, {"runs": [None, {"setting": [], "objective": {}, "seed": "x"}], "objectives": 5}, []):
        (grid / "grid.json").write_text(json.dumps(record))
        assert "bapo beats grpo (+0.117" in top(grid)[0]["lines"][0]  # grpo comes first without a grid, too


def test_several_settings_share_one_table_of_differences(grid):
    shutil.copytree(grid / "s", grid / "other")
    verdict, (table,) = top(grid)
    assert [line.split(":")[0] for line in verdict["lines"]] == ["other", "s"]
    assert [row[0] for row in table["rows"]] == ["other: bapo - grpo", "s: bapo - grpo"]


def test_arms_meet_in_their_setting_or_in_their_objective_or_all_of_them(tmp_path):
    def named(*labels):
        base = read_run(ONE)
        listed = []
        for number, (setting, objective) in enumerate(labels):
            path = tmp_path / setting / objective / "seed-0"
            config = base.config | {"seed": 0, "steps": 100 + number}
            listed.append(Run(**{**vars(base), "path": path, "config": config}))
        (tmp_path / "grid.json").write_text("{}")
        return list(places(arms_of(listed)))

    assert named(("s", "a"), ("s", "b"), ("t", "a")) == [("s", "a"), ("s", "b"), ("t", "a")]
    assert named(("s", "a"), ("t", "a")) == [("a", "s"), ("a", "t")]
    assert named(("s", "a"), ("t", "b")) == [("", "a, s"), ("", "b, t")]


def test_others_are_measured_against_a_fixed_clip(tmp_path):
    for preset in ("fixed", "paper"):
        run = shutil.copytree(ONE, tmp_path / preset)
        config = json.loads((run / "config.json").read_text())
        config["objective"] |= {"name": "bapo", "preset": preset}
        (run / "config.json").write_text(json.dumps(config))
    (line,) = top(tmp_path)[0]["lines"]
    assert line.startswith("bapo preset paper has too few seeds to be compared with grpo (+0.000 avg@2 over 1 seed).")


@pytest.mark.parametrize(
    ("objective", "name"),
    [
        ({"name": "bapo", "preset": "fixed"}, "grpo"),
        ({"name": "bapo", "preset": "push-once"}, "push_once"),
        ({"name": "push_once", "preset": None}, "push_once"),
        ({"name": "bapo", "preset": "weak-model"}, "bapo"),
        ({"name": "bapo", "preset": "fixed", "high": [1.2, 2.0]}, "bapo"),
        ({"name": "bapo", "preset": "fixed", "remainder": "weigh"}, "bapo"),
        ({"name": "bapo", "preset": None}, "bapo"),
        ({"name": "grpo", "preset": None}, "grpo"),
    ],
)
def test_a_clip_that_searches_for_nothing_is_not_called_bapo(tmp_path, objective, name):
    run = shutil.copytree(ONE, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"objective": config["objective"] | objective}))
    (arm,) = arms_of([read_run(run)])
    assert arm.objective == name


def test_one_run_tells_from_where_to_where_it_got(tmp_path):
    verdict, differences = top(ONE)
    summary = json.loads((ONE / "summary.json").read_text())
    before, after = summary["before"], summary["after"]
    said = [
        f"{line['eval/avg']:.3f} [{line['eval/avg_low']:.3f}, {line['eval/avg_high']:.3f}]" for line in (before, after)
    ]
    assert verdict["lines"] == [f"avg@2 went from {said[0]} to {said[1]}, which may be chance."]
    assert (verdict["tone"], differences) == ("open", [])
    assert [after[f"eval/{key}"] for key in ("avg_low", "avg", "avg_high")] == pytest.approx(
        [0.02, 0.125, 0.495], abs=1e-3
    )
    assert verdict["notes"][:2] == [
        f"{FEW}: {DOUBT} 0.37 higher or lower (95%).",  # .495 - .125, which is farther than .694 - .375 before training
        "In brackets: 95% intervals over problems.",
    ]
    for low, high, word, tone in ((0.8, 0.9, "rose", "decided"), (0.0, 0.1, "fell", "wrong")):
        run = shutil.copytree(ONE, tmp_path / word)
        score = {"eval/avg": (low + high) / 2, "eval/avg_low": low, "eval/avg_high": high}
        rewritten(run, lambda line, score=score: line.update(score))
        verdict, _ = top(run)
        assert verdict["lines"][0].startswith(f"avg@2 {word} from 0.375 [0.137, 0.694] to {score['eval/avg']:.3f} [")
        assert verdict["tone"] == tone


def test_a_gain_of_seeds_whose_interval_has_zero_is_open(tmp_path):
    for seed, avg in enumerate((0.36, 0.37, 0.395)):  # gains -.015 -.005 .02: 0 ± 4.3027 · .018028 / √3 = .045
        copied(ONE, tmp_path / f"seeds/run{seed}", avg, seed)
    seeds = top(tmp_path / "seeds")[0]
    assert seeds["lines"] == ["avg@2 went from 0.375 to 0.375 (+0.000 ± 0.045 over 3 seeds)."]
    assert seeds["tone"] == "open"


def test_other_temperatures_of_one_run_have_a_clause_each(tmp_path):
    run = shutil.copytree(ONE, tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    greedy = {"temperature": 0.0, "before": summary["before"], "after": summary["before"]}
    (run / "summary.json").write_text(json.dumps(summary | {"also_at": [greedy]}))
    line = top(run)[0]["lines"][0]
    assert line.startswith("avg@2 at temperature 1 went from 0.375")
    again = "0.375 [0.137, 0.694]"
    assert line.endswith(f"; with greedy sampling it went from {again} to {again}, which may be chance.")


def test_seeds_of_one_configuration_are_not_a_comparison(tmp_path):
    """From .375 to .5 .55 .6: gains .125 .175 .225, mean .175, ± 4.3027 · .05 / √3 = .124."""
    for seed, avg in enumerate((0.5, 0.55, 0.6)):
        copied(ONE, tmp_path / f"run{seed}", avg, seed)
    verdict, differences = top(tmp_path)
    assert verdict["lines"] == ["avg@2 rose from 0.375 to 0.550 (+0.175 ± 0.124 over 3 seeds)."]
    assert (verdict["tone"], differences) == ("decided", [])
    (exam,) = verdict["notes"]
    assert exam.endswith(ALL_THE_SAME)
    shutil.rmtree(tmp_path / "run2")
    two = top(tmp_path)[0]  # gains .125 .175
    assert two["lines"] == ["avg@2 went from 0.375 to 0.525 (+0.150 over 2 seeds)."]
    assert two["tone"] == "open"
    fewer, seeds = two["notes"]
    assert fewer.startswith(f"{FEW}: {DOUBT} 0.")
    assert fewer.endswith("higher or lower (95%).")
    assert seeds == "Two seeds are too few to say what another one would give."


def test_an_unfinished_run_says_how_far_it_got(tmp_path):
    run = shutil.copytree(ONE, tmp_path / "run")
    (run / "summary.json").unlink()
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward"] for line in logged if line["kind"] == "rollout"]
    assert top(run)[0]["lines"] == [
        f"After 3 of 3 steps, the reward of sampled responses went from {rewards[0]:.3f} to {rewards[-1]:.3f}. The "
        "score on held-out problems comes at the end."
    ]


# Signs


def with_log(rollouts=(), updates=(), **more):
    """A run of forty steps with these metrics."""
    run = read_run(ONE)
    listed = [{"kind": "rollout", "step": i + 1, "reward": value} for i, value in enumerate(rollouts)]
    logged = [{"kind": "update", "step": i + 1, "version": i + 1} | line for i, line in enumerate(updates)]
    return Run(**{**vars(run), "rollouts": listed, "updates": logged, "summary": {}} | more)


def said(run):
    return signs(arms_of([run]))


@pytest.mark.parametrize(
    "objective",
    [
        {"name": "brake"},
        {"name": "push_once"},
        {"name": "grpo", "options": {"used_low": 1.0}},
        {"name": "bapo", "preset": "weak-model", "brake": 0.05},
    ],
)
def test_negative_tokens_that_a_rule_of_used_tokens_blocks_are_no_sign(objective):
    def blocked(positive, objective):
        run = with_log(updates=[{"clip_fraction": 0.4, "clip_fraction_positive": positive}] * 40)
        return said(Run(**{**vars(run), "config": run.config | {"objective": objective}}))

    assert blocked(0.1, {"name": "grpo"}) == ["the clip blocked 40% of the tokens in the last tenth of updates."]
    assert blocked(0.1, objective) == []
    assert blocked(0.3, objective) == ["the clip blocked 30% of the positive tokens in the last tenth of updates."]


def test_a_sound_run_shows_no_sign():
    calm = [{"entropy": 0.5, "clip_fraction": 0.1, "grad_norm": 1.0 + i % 3, "stop": i % 2} for i in range(40)]
    assert said(with_log([0.3 + 0.01 * i for i in range(40)], calm)) == []
    assert said(with_log([0.9, 0.0], [{"entropy": 1.0, "grad_norm": 1.0}, {"entropy": 0.0, "grad_norm": 99.0}])) == []


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (
            with_log([0.2] * 10 + [0.8] * 10 + [0.1] * 20),
            "the reward collapsed from 0.80 at its best to 0.10 at the end.",
        ),
        (
            with_log(updates=[{"entropy": 0.8}] * 20 + [{"entropy": 0.1}] * 20),
            "entropy fell from 0.800 to 0.100 nats per token, so the policy explores little.",
        ),
        (
            with_log(updates=[{"entropy": 0.5}] * 20 + [{"entropy": 1.5}] * 20),
            "entropy rose from 0.500 to 1.500 nats per token, so the policy has become more random.",
        ),
        (
            with_log(updates=[{"clip_fraction": 0.0}] * 36 + [{"clip_fraction": 0.4}] * 4),
            "the clip blocked 40% of the tokens in the last tenth of updates.",
        ),
        (
            with_log(updates=[{"grad_norm": 2.0}] * 30 + [{"grad_norm": 50.0}] + [{"grad_norm": 2.0}] * 9),
            "the gradient norm reached 50 in update 31, 25 times its median.",
        ),
        (
            with_log(updates=[{"stop": 0, "clip_low": 0.8, "clip_high": 1.2}] * 40),
            "the bounds never moved from (0.8, 1.2), so a fixed clip would have done the same.",
        ),
        (with_log(skipped=[{"step": 3}] * 2), "2 updates were skipped, because their numbers were not finite."),
        (
            with_log(
                summary={"before": {"eval/truncated": 0.2}, "after": {"eval/truncated": 0.6, "eval/problems": 50}}
            ),
            "the length limit cuts off 60% of the held-out responses, and 20% before training.",
        ),
        (
            with_log(summary={"before": {}, "after": {"eval/failures": 7.0}}),
            "the verifier failed on 7 held-out responses, which count as wrong.",
        ),
    ],
)
def test_signs_of_trouble(run, text):
    assert said(run) == [text]


def counted(rewards, *, groups=5, kept=0, filtered=0):
    """A run with these rewards, four responses to a group, and the groups that the buffer kept and refused so far."""
    run = with_log(rewards)
    more = {"rollout/finished_groups": groups, "rollout/dropped": 0, "buffer/added": kept, "buffer/filtered": filtered}
    return Run(**{**vars(run), "rollouts": [line | more for line in run.rollouts]})


def test_a_run_that_earns_no_reward_is_told_what_to_do():
    (text,) = said(counted([0.0] * 10, filtered=50))  # 200 responses
    assert text.startswith("the reward was 0 in all 10 steps, so there was next to nothing to learn from; warm-start")
    assert "(docs/sft.md)" in text
    (text,) = said(counted([0.0] * 9 + [0.05], kept=1, filtered=49))
    assert text.startswith("the reward was 0 in 9 of 10 steps,")
    assert said(counted([0.0] * 8 + [0.05] * 2)) == []
    assert said(counted([0.0] * 4)) == []  # 80 responses are few
    assert said(counted([-1.0] + [0.0] * 39)) == []  # 0 is the best that it can earn
    assert said(counted([0.0] * 10, kept=30, filtered=20)) == []  # rewards of both signs, whose mean is 0


@pytest.mark.parametrize(
    ("reward", "advice"),
    [
        (0.1, "or easier problems, or a warm start (docs/sft.md)."),
        (0.9, "or harder problems."),
        (3.0, "or easier or harder problems."),
        (-0.2, "or easier or harder problems."),
    ],
)
def test_groups_without_a_signal_are_counted(reward, advice):
    (text,) = said(counted([reward] * 10, kept=15, filtered=35))
    assert text.startswith(
        "70% of the groups carried no signal, because all responses of a group earned the same reward"
    )
    assert text.endswith(advice)
    assert said(counted([reward] * 10, kept=20, filtered=40)) == []  # two thirds are the limit
    assert said(counted([reward] * 10, kept=1, filtered=18)) == []  # few groups


def test_responses_that_are_cut_off_from_the_start_are_told():
    def cut(share, **more):
        run = counted([0.5] * 10, **more)
        return Run(**{**vars(run), "rollouts": [line | {"truncated": share} for line in run.rollouts]})

    (text,) = said(cut(0.8))
    limit = read_run(ONE).config["rollout"]["max_tokens"]
    assert text.startswith("the length limit cut off 80% of the responses, so the reward is mostly one of unfinished")
    assert f"raise rollout.max_tokens, which is {limit}," in text
    assert said(cut(0.75)) == []
    assert said(cut(1.0, groups=2)) == []  # 80 responses are few


def test_a_sign_of_several_seeds_is_said_once():
    bad = with_log([0.8] * 20 + [0.1] * 20)
    good = with_log([0.8] * 40)
    seeds = [
        Run(**{**vars(run), "path": run.path.with_name(f"run-{n}"), "config": run.config | {"seed": n}})
        for n, run in enumerate((good, bad, bad))
    ]
    assert signs(arms_of(seeds)) == ["the reward collapsed from 0.80 at its best to 0.10 at the end (2 of 3 seeds)."]
