"""The verdict on a comparison, with numbers by hand."""

from math import nan, sqrt

import pytest

from bapo.runs.comparison import compare_arms, difference_cells, judge, meeting_by, scores

T4, T2 = 2.7764451, 4.3026527  # Student's t for five and for three seeds


def runs(objective, *, setting="s", **measures):
    """Runs of one arm; each measure is a list over seeds 0, 1, …, or a dict by seed."""
    by_seed = {name: v if isinstance(v, dict) else dict(enumerate(v)) for name, v in measures.items()}
    seeds = next(iter(by_seed.values()))
    return [
        {
            **{"setting": setting, "objective": objective, "seed": seed},
            "measures": {name: values[seed] for name, values in by_seed.items()},
        }
        for seed in seeds
    ]


def verdict(listed, objectives, settings=("s",), *, k=8, temperature=1.0, unlike=(), **more):
    one = {"eval.k": k, "eval.temperature": temperature}
    configs = {setting: [one, one | dict.fromkeys(unlike, 0.6)] for setting in settings}
    return judge(compare_arms(listed, settings, objectives), configs, **more)


GRPO = [0.40, 0.41, 0.42, 0.43, 0.44]


def shifted(base, *by):
    return [value + more for value, more in zip(base, by, strict=True)]


def test_an_interval_that_excludes_zero_decides():
    """Differences .03 .04 .05 .04 .04: mean .04, s = √(.0002 / 4) = .0070711, ± 2.776 · s / √5 = .00878."""
    push = shifted(GRPO, 0.03, 0.04, 0.05, 0.04, 0.04)
    assert T4 * sqrt(0.0002 / 4) / sqrt(5) == pytest.approx(0.00878, abs=1e-5)
    found = verdict(runs("grpo", avg=GRPO) + runs("push-once", avg=push), ["grpo", "push-once"])
    assert found.lines == ["push-once beats grpo (+0.040 ± 0.009 avg@8 over 5 seeds)."]
    assert found.decided
    assert found.notes == []
    turned = verdict(runs("grpo", avg=GRPO) + runs("push-once", avg=push), ["push-once", "grpo"])
    assert turned.lines == ["grpo falls short of push-once (-0.040 ± 0.009 avg@8 over 5 seeds)."]


def test_an_interval_that_contains_zero_does_not():
    """Differences .02 -.02 .01: mean .00333, s = .0208167, ± 4.3027 · s / √3 = .05171."""
    listed = runs("grpo", avg=GRPO[:3]) + runs("bapo", avg=shifted(GRPO[:3], 0.02, -0.02, 0.01))
    found = verdict(listed, ["grpo", "bapo"])
    assert found.lines == ["bapo cannot be told apart from grpo (+0.003 ± 0.052 avg@8 over 3 seeds)."]
    assert not found.decided
    same = verdict(runs("grpo", avg=GRPO) + runs("bapo", avg=GRPO), ["grpo", "bapo"])
    assert same.lines == ["bapo has exactly the score of grpo (+0.000 ± 0.000 avg@8 over 5 seeds)."]


@pytest.mark.parametrize(
    ("seeds", "line"),
    [
        (1, "bapo has too few seeds to be compared with grpo (+0.200 avg@8 over 1 seed)."),
        (2, "bapo has too few seeds to be compared with grpo (+0.200 avg@8 over 2 seeds)."),
    ],
)
def test_one_or_two_seeds_decide_nothing(seeds, line):
    listed = runs("grpo", avg=[0.25, 0.5][:seeds]) + runs("bapo", avg=[0.45, 0.7][:seeds])
    found = verdict(listed, ["grpo", "bapo"])
    assert (found.lines, found.notes) == ([line], ["Run at least 3 seeds to decide more."])
    assert not found.decided


def test_only_seeds_that_both_have_count():
    listed = runs("grpo", avg={0: 0.4, 1: 0.5, 2: 0.6, 7: 0.0}) + runs("bapo", avg={2: 0.7, 1: 0.6, 0: 0.5, 9: 1.0})
    found = verdict(listed, ["grpo", "bapo"])
    assert found.lines == ["bapo beats grpo (+0.100 ± 0.000 avg@8 over 3 seeds)."]
    apart = verdict(runs("grpo", avg={0: 0.4}) + runs("bapo", avg={1: 0.5}), ["grpo", "bapo"])
    assert apart.lines == ["bapo has no score in a seed of grpo."]


def test_runs_that_are_missing_are_said():
    one = verdict(runs("grpo", avg=GRPO), ["grpo", "bapo"], missing=5)
    assert one.lines == ["bapo has no score in a seed of grpo."]
    assert one.notes == ["5 runs are not finished, so this may change."]
    reference = verdict(runs("bapo", avg=GRPO), ["grpo", "bapo"], missing=1)
    assert reference.lines == ["grpo has no finished run, so there is nothing to measure the others by."]
    assert reference.notes == ["One run is not finished, so this may change."]


def test_every_temperature_has_its_sentence():
    """At 1: differences 0; at 0.6: .05 each; greedy: -.1 each."""
    lower = [value - 0.1 for value in GRPO]
    listed = runs("grpo", **{"avg": GRPO, "avg_at_0.6": GRPO, "avg_at_0": GRPO})
    listed += runs("push-once", **{"avg": GRPO, "avg_at_0.6": shifted(GRPO, *[0.05] * 5), "avg_at_0": lower})
    found = verdict(listed, ["grpo", "push-once"])
    assert found.lines == ["push-once falls short of grpo (-0.100 ± 0.000 avg@1 with greedy sampling over 5 seeds)."]
    assert found.details == [
        "push-once has exactly the score of grpo (+0.000 ± 0.000 avg@8 at temperature 1 over 5 seeds). push-once beats "
        "grpo (+0.050 ± 0.000 avg@8 at temperature 0.6 over 5 seeds)."
    ]


def test_the_temperature_that_decides_comes_first():
    """At 0.6: .03 .04 .05 .04 .04, so .040 ± .009; at 1: .02 -.02 .01 0 0, so .002 ± .018."""
    at_one, lower = shifted(GRPO, 0.02, -0.02, 0.01, 0, 0), shifted(GRPO, 0.03, 0.04, 0.05, 0.04, 0.04)
    listed = runs("grpo", **{"avg": GRPO, "avg_at_0.6": GRPO})
    listed += runs("push-once", **{"avg": at_one, "avg_at_0.6": lower})
    found = verdict(listed, ["grpo", "push-once"])
    assert found.lines == ["push-once beats grpo (+0.040 ± 0.009 avg@8 at temperature 0.6 over 5 seeds)."]
    assert found.details == [
        "push-once cannot be told apart from grpo (+0.002 ± 0.018 avg@8 at temperature 1 over 5 seeds)."
    ]


def test_several_arms_are_grouped_by_what_can_be_said_of_them():
    listed = runs("grpo", avg=GRPO) + runs("bapo", avg=shifted(GRPO, 0.1, -0.1, 0, 0, 0))
    listed += runs("push-once", avg=shifted(GRPO, *[0.05] * 5)) + runs("dcpo", avg=shifted(GRPO, *[0.02] * 5))
    listed += runs("sapo", avg=shifted(GRPO, *[-0.03] * 5)) + runs("topr", avg=[0.5]) + runs("cispo", avg={8: 0.5})
    names = ["grpo", "bapo", "dcpo", "push-once", "sapo", "topr", "cispo", "gspo"]
    assert verdict(listed, names).lines == [
        "push-once and dcpo beat grpo (+0.050 ± 0.000, +0.020 ± 0.000 avg@8 over 5 seeds); sapo falls short of it "
        "(-0.030 ± 0.000); bapo cannot be told apart from it (+0.000 ± 0.088); topr has too few seeds to be compared "
        "with it (+0.100 over 1 seed); cispo and gspo have no score in a seed of it."
    ]


def test_several_arms_at_several_temperatures():
    up, down = shifted(GRPO, *[0.05] * 5), shifted(GRPO, *[-0.02] * 5)
    listed = runs("grpo", **{"avg": GRPO, "avg_at_0.6": GRPO, "avg_at_0": GRPO, "pass": GRPO})
    listed += runs("a", **{"avg": GRPO, "avg_at_0.6": up, "avg_at_0": GRPO, "pass": up})
    listed += runs("b", **{"avg": up, "avg_at_0.6": down, "avg_at_0": GRPO, "pass": up})
    found = verdict(listed, ["grpo", "a", "b"])
    assert found.lines == [
        "b beats grpo (+0.050 ± 0.000 avg@8 at temperature 1 over 5 seeds); a has exactly the score of it (+0.000 ± "
        "0.000)."
    ]
    assert found.details == [
        "a and b have exactly the score of grpo (+0.000 ± 0.000, +0.000 ± 0.000 avg@1 with greedy sampling over 5 "
        "seeds). a beats grpo (+0.050 ± 0.000 avg@8 at temperature 0.6 over 5 seeds); b falls short of it (-0.020 ± "
        "0.000). a beats grpo (+0.050 ± 0.000 pass@8 at temperature 1 over 5 seeds)."
    ]


def test_settings_have_a_line_each_and_chance_is_named():
    listed = []
    for setting in "abcde":
        listed += runs("grpo", setting=setting, **{"avg": GRPO, "avg_at_0.6": GRPO})
        up = shifted(GRPO, *[0.05] * 5)
        listed += runs("bapo", setting=setting, **{"avg": up, "avg_at_0.6": up})
    found = verdict(listed, ["grpo", "bapo"], "abcde")
    assert [line.split(" (")[0] for line in found.lines] == [f"{setting}: bapo beats grpo" for setting in "abcde"]
    assert found.notes == ["10 differences were judged, each at 95%, so about 1 may stand out by chance."]


def test_more_seeds_are_asked_for_once():
    listed = [run for setting in "ab" for name in ("grpo", "bapo") for run in runs(name, setting=setting, avg=[0.5])]
    found = verdict(listed, ["grpo", "bapo"], "ab")
    too_few = "bapo has too few seeds to be compared with grpo (+0.000 avg@8 over 1 seed)."
    assert found.lines == [f"{setting}: {too_few}" for setting in "ab"]
    assert found.notes == ["Run at least 3 seeds to decide more."]


def test_a_score_that_is_not_a_number_decides_nothing():
    broken = [nan, 0.9, 0.9, 0.9, 0.9]
    found = verdict(runs("grpo", avg=GRPO) + runs("bapo", avg=broken), ["grpo", "bapo"])
    assert found.lines == ["bapo has no score in a seed of grpo."]
    assert not found.decided


def test_pass_is_mentioned_where_it_says_something_else():
    """avg cannot be told apart, pass is .05 higher in every seed; where both agree, avg is enough."""
    up = shifted(GRPO, *[0.05] * 5)
    listed = runs("grpo", **{"avg": GRPO, "pass": GRPO}) + runs("bapo", **{"avg": GRPO, "pass": up})
    assert verdict(listed, ["grpo", "bapo"]).details == ["bapo beats grpo (+0.050 ± 0.000 pass@8 over 5 seeds)."]
    agreed = runs("grpo", **{"avg": GRPO, "pass": GRPO}) + runs("bapo", **{"avg": up, "pass": up})
    assert verdict(agreed, ["grpo", "bapo"]).details == verdict(listed, ["grpo", "bapo"], k=1).details == []


def test_arms_that_all_ended_below_their_start_are_named():
    """bapo beats grpo, and yet both lost something: .50 to .42 and .50 to .47."""
    start = [0.5] * 5
    listed = runs("grpo", avg=GRPO, avg_before=start) + runs("bapo", avg=shifted(GRPO, *[0.05] * 5), avg_before=start)
    found = verdict(listed, ["grpo", "bapo"])
    assert found.lines == ["bapo beats grpo (+0.050 ± 0.000 avg@8 over 5 seeds)."]
    said = "Both arms ended below where they started: grpo from 0.500 to 0.420 and bapo from 0.500 to 0.470 avg@8."
    assert found.details == [said]
    third = runs("dcpo", avg=GRPO[:1], avg_before=start[:1])
    (all_three,) = verdict(listed + third, ["grpo", "bapo", "dcpo"]).details
    assert all_three.startswith("All 3 arms ended below where they started: grpo from 0.500 to 0.420, bapo from")
    for level in (0.42, 0.4204, 0.3, nan):  # one arm that did not fall, in the digits shown, is enough
        other = runs("dcpo", avg=[level], avg_before=[0.42])
        assert bool(verdict(listed + other, ["grpo", "bapo", "dcpo"]).details) == (level == 0.3)
    assert verdict(listed, ["grpo", "bapo"], unlike=["eval.k"]).details == []


def test_scores_of_different_exams_are_not_compared():
    listed = runs("grpo", avg=GRPO) + runs("bapo", avg=shifted(GRPO, *[0.3] * 5))
    found = verdict(listed, ["grpo", "bapo"], unlike=["eval.temperature", "learn.lr"])
    assert found.lines == ["The scores cannot be compared, because the runs differ in eval.temperature."]
    found = verdict(listed, ["grpo", "bapo"], unlike=["task.holdout", "task.train"])
    assert found.lines == ["The scores cannot be compared, because the runs differ in task.holdout and task.train."]
    assert verdict(listed, ["grpo", "bapo"], unlike=["task.train"]).decided  # what a fixed exam has no part in
    assert not found.decided


def test_the_problems_are_counted_and_few_are_a_warning():
    """32 problems: the intervals of the scores over problems reach .14 at most. From 100 on, the number is enough."""

    def notes(problems, *, other=None, **more):
        exam = {"problems": [problems] * 3, "avg_reach": [0.12] * 3}
        listed = runs("grpo", avg=GRPO[:3], **exam)
        listed += runs("bapo", avg=GRPO[:3], **exam | {"problems": [other or problems] * 3, "avg_reach": [0.14] * 3})
        return verdict(listed, ["grpo", "bapo"], **more).notes

    assert notes(32) == [
        "The scores are from only 32 held-out problems. Fewer than 100 are few: over all problems of this kind, a "
        "score may be up to 0.14 higher or lower (95%). Intervals over seeds leave this out, because every seed has "
        "the same problems."
    ]
    assert notes(99)[0].startswith("The scores are from only 99 held-out problems. Fewer than")
    assert notes(100) == ["The scores are from 100 held-out problems."]
    assert notes(1319) == ["The scores are from 1,319 held-out problems."]
    assert notes(200, other=300) == ["The scores are from 200 to 300 held-out problems."]
    assert notes(32, other=512)[0].startswith("The scores are from 32 to 512 held-out problems. Fewer than 100 are few")
    assert notes(32, unlike=["eval.k"]) == []  # nothing was compared
    assert notes(nan) == []
    alone = runs("grpo", avg=GRPO[:1], problems=[32]) + runs("bapo", avg=GRPO[:1], problems=[32])
    assert verdict(alone, ["grpo", "bapo"]).notes == [  # one seed has no interval, and these scores have none either
        "Run at least 3 seeds to decide more.",
        "The scores are from only 32 held-out problems. Fewer than 100 are few.",
    ]


def test_settings_meet_where_there_is_one_objective():
    assert meeting_by(["a", "b"], ["grpo"]) == ("objective", "setting")
    assert meeting_by(["a"], ["grpo"]) == meeting_by(["a", "b"], ["grpo", "bapo"]) == ("setting", "objective")
    listed = runs("grpo", setting="a", avg=GRPO) + runs("grpo", setting="b", avg=shifted(GRPO, *[0.1] * 5))
    one = {"eval.k": 4, "eval.temperature": 1.0}
    tables = compare_arms(listed, ["grpo"], ["a", "b"], ("objective", "setting"))
    assert judge(tables, {"grpo": [one, one]}).lines == ["b beats a (+0.100 ± 0.000 avg@4 over 5 seeds)."]
    apart = compare_arms(listed, ["a", "b"], ["grpo"])
    assert judge(apart, {"a": [one], "b": [one]}).lines == []  # nothing to compare


def test_the_table_of_differences_marks_what_the_verdict_decides():
    push = shifted(GRPO, 0.03, 0.04, 0.05, 0.04, 0.04)
    listed = runs("grpo", **{"avg": GRPO, "pass": GRPO}) + runs("push-once", **{"avg": push, "pass": GRPO})
    listed += runs("bapo", **{"avg": push[:2], "pass": GRPO[:2]}) + runs("dcpo", **{"avg": push[:1], "pass": GRPO[:1]})
    rows = compare_arms(listed, ["s"], ["grpo", "push-once", "bapo", "dcpo"])["s"]
    assert difference_cells(rows, 8) == [
        ["", "seeds", "avg@8", "pass@8", "entropy"],
        ["push-once - grpo", "5", "+0.040 ± 0.009*", "+0.000 ± 0.000 ", "–"],
        ["bapo - grpo", "2", "+0.035", "+0.000", "–"],  # two seeds have no interval
    ]
    assert list(scores(8, {"avg", "avg_at_0", "avg_at_0.6"})) == [
        *("avg@8", "pass@8", "avg, temp. 0", "avg, temp. 0.6", "pass, temp. 0.6", "entropy")
    ]


def test_several_arms_with_greedy_sampling_first_are_measured_by_one_response():
    arms = {"grpo": GRPO, "a": shifted(GRPO, *[0.05] * 5), "b": GRPO}
    listed = [run for name, avg in arms.items() for run in runs(name, avg=avg, **{"avg_at_1": GRPO})]
    found = verdict(listed, list(arms), temperature=0.0)
    assert found.lines[0].startswith("a beats grpo (+0.050 ± 0.000 avg@1 with greedy sampling over 5 seeds)")
