"""The simulator of the asynchronous schedule, against times that were computed by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path

import async_schedule as command
import pytest
import schedule_loops as loops

from tests.compared_runs import COMPARED
from tests.processes import script

ROOT = Path(__file__).parents[2]


# A response decodes 10 tokens per second however many run beside it; an update takes 1 second per 100 tokens, nothing
# else takes time.
PLAIN = loops.Setting(
    prompts=2,
    responses=1,
    steps=3,
    batches=1,
    ahead=1,
    staleness=1,
    engines=1,
    slots=8,
    alone=10.0,
    saturated=math.inf,
    prefill=math.inf,
    prompt_tokens=0,
    learn=100.0,
    update_seconds=0.0,
    gather_seconds=0.0,
    load_seconds=0.0,
)
LONG_TAIL = command.LogNormal(30, limit=300)


def long_tailed(setting, seed=0):
    return LONG_TAIL.groups(setting.steps * setting.prompts, setting.responses, seed)


def near(value):
    return pytest.approx(value, abs=1e-6)


# constant lengths: 2 responses of 100 tokens take 10 s, an update on them 2 s


def test_taking_turns_costs_the_sum():
    lengths = [[100]] * 6
    for outcome in (loops.synchronous(PLAIN, lengths), loops.asynchronous(replace(PLAIN, ahead=0), lengths)):
        assert outcome.seconds == near(3 * (10 + 2))
        assert outcome.step_seconds == near(12)
        assert outcome.tokens == 600
        assert outcome.engines_idle == near(6 / 36)
        assert outcome.learner_idle == near(30 / 36)
        assert outcome.staleness_max == 0


def test_one_step_ahead_hides_the_shorter_of_the_two():
    # windows 0 and 1 open at once and both finish at 10; the update on rollout 0 ends at 12, and window 2 opens; the
    # update on rollout 1 ends at 14; window 2 finishes at 22, and its update ends at 24
    outcome = loops.asynchronous(PLAIN, [[100]] * 6)
    assert outcome.rollouts == [[0, 1], [2, 3], [4, 5]]
    assert outcome.seconds == near(24)
    # two slots: one window at a time decodes. Window 0 at 10, window 1 at 20, window 2 (open at 12) at 30, update 2 s
    outcome = loops.asynchronous(replace(PLAIN, slots=2), [[100]] * 6)
    assert outcome.rollouts == [[0, 1], [2, 3], [4, 5]]
    assert outcome.seconds == near(3 * 10 + 2)
    assert outcome.engines_idle == near(2 / 32)
    # window 1 begins at 10, before the first update ends; window 2 at 20 with version 1, and is used at version 2
    assert outcome.staleness_max == 1


def test_the_learner_is_never_idle_when_it_is_the_slower_one():
    slow = replace(PLAIN, slots=2, learn=10.0)  # an update takes 20 s, a window 10 s
    outcome = loops.asynchronous(slow, [[100]] * 6)
    assert outcome.seconds == near(10 + 3 * 20)


# one long response: group 0 needs 100 s, all others 1 s; updates are free


def one_long(**changes):
    setting = replace(PLAIN, prompts=2, steps=8, learn=math.inf, update_seconds=2.0, **changes)
    return loops.asynchronous(setting, [[1000], *[[10]] * 15])


def test_a_long_response_holds_up_nothing_that_the_bound_allows():
    # rollout 0 is whole at 1 without group 0, and so is every later one but the last; group 3 waits for rollout 1
    outcome = one_long(staleness=100)
    assert outcome.rollouts[:2] == [[1, 2], [3, 4]]
    assert outcome.waited_for_due == 0
    assert outcome.latest == 7
    # the last rollout waits for it, because nothing else is left; 100 s and one update
    assert outcome.seconds == near(102)
    assert outcome.staleness_max == max(k for k, rollout in enumerate(outcome.rollouts) if 0 in rollout)


def test_the_learner_waits_for_a_group_that_would_become_too_old():
    # u = 1: at version v the group with version 0 is due if v + 1 > S, so with S = 3 rollouts 0, 1, 2 do not wait for
    # it, but rollout 3 does
    outcome = one_long(staleness=3)
    waited = next(k for k, rollout in enumerate(outcome.rollouts) if 0 in rollout)
    assert waited == 3
    assert outcome.staleness_max == 3
    # updates begin at 1, 4 and 7, because each rollout lacks one group of the window that opens with the update's end;
    # the eighth of the short groups finishes at 10, and from then on the learner waits only for the long one, until 100
    assert outcome.waited_for_due == near(90)


def test_a_synchronous_step_waits_for_its_longest_response():
    lengths = [[1000], [10], [10], [10]]
    setting = replace(PLAIN, steps=2, learn=math.inf, update_seconds=2.0)
    assert loops.synchronous(setting, lengths).seconds == near(100 + 2 + 1 + 2)


# weights, prefill and load


def test_more_responses_slow_each_other_down():
    # a decoding step takes 1/10 + n/20 s: four responses 0.3 s
    setting = replace(PLAIN, prompts=4, steps=1, saturated=20.0, learn=math.inf)
    assert loops.synchronous(setting, [[10]] * 4).seconds == near(10 * 0.3)
    # two engines share them: 0.2 s
    assert loops.synchronous(replace(setting, engines=2), [[10]] * 4).seconds == near(10 * 0.2)


def test_loading_takes_turns_or_happens_at_once():
    setting = replace(PLAIN, steps=2, engines=2, load_seconds=3.0, learn=math.inf)
    lengths = [[100]] * 4
    for together, rolling, seconds in ((False, True, 26), (False, False, 23), (True, True, 20)):
        outcome = loops.synchronous(replace(setting, rolling=rolling), lengths, together=together)
        assert outcome.seconds == near(seconds)


def test_a_response_is_prefilled_again_after_a_load():
    # one engine: group 1 (10 tokens) ends at 1 s, its update at 2 s; then 2 s of load and prefill of 10 + 20 tokens at
    # 10 per second; 80 of 100 tokens are left
    setting = replace(
        PLAIN, prompts=1, steps=2, slots=2, prompt_tokens=10, prefill=10.0, load_seconds=2.0, learn=math.inf
    )
    setting = replace(setting, update_seconds=1.0, staleness=5)
    outcome = loops.asynchronous(setting, [[100], [10]])
    # the prefill of both prompts takes 2 s first: 2 + 1 + 1 (update) + 2 + 3 + 8 + 1 (update)
    assert outcome.rollouts == [[1], [0]]
    assert outcome.seconds == near(18)
    # tokens of group 0: 20 of version 0 and 80 of version 1, used at version 1; group 1: 10 of version 0, used at 0
    assert outcome.staleness_mean == near(20 / 110)


def test_staleness_counts_updates():
    # two passes of two batches, as in the buffer: updates 0..3 use groups 0, 1, 0, 1
    setting = replace(PLAIN, steps=1, batches=2, passes=2, staleness=7)
    outcome = loops.synchronous(setting, [[100], [100]])
    assert outcome.staleness_mean == near((0 + 1 + 2 + 3) / 4)
    assert outcome.staleness_max == 3


# whatever happens


REAL = loops.Setting(
    prompts=8,
    responses=4,
    steps=20,
    batches=2,
    engines=3,
    slots=6,
    alone=10.0,
    saturated=40.0,
    prefill=500.0,
    learn=60.0,
)


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("spare", [0, 1, 5])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_group_is_used_once_and_within_the_bound(ahead, spare, seed):
    setting = replace(REAL, ahead=ahead, staleness=(ahead + 1) * 2 - 1 + spare)
    outcome = loops.asynchronous(setting, long_tailed(setting, seed))
    assert sorted(id for rollout in outcome.rollouts for id in rollout) == list(range(160))
    assert outcome.staleness_max <= setting.staleness
    assert 0 <= outcome.engines_idle < 1
    assert 0 <= outcome.learner_idle < 1


@pytest.mark.parametrize("rolling", [True, False])
def test_zero_steps_ahead_is_the_synchronous_loop(rolling):
    setting = replace(REAL, ahead=0, rolling=rolling)
    lengths = long_tailed(setting)
    ours, theirs = loops.asynchronous(setting, lengths), loops.synchronous(setting, lengths)
    assert ours.rollouts == theirs.rollouts == [list(range(8 * k, 8 * k + 8)) for k in range(20)]
    assert ours.seconds == near(theirs.seconds)
    assert ours.engines_idle == near(theirs.engines_idle)
    assert ours.staleness_mean == near(theirs.staleness_mean)


def test_a_bound_that_nothing_could_meet_is_refused():
    with pytest.raises(ValueError, match=r"staleness=2 is too small.*Set staleness >= 3"):
        loops.asynchronous(replace(REAL, staleness=2), long_tailed(REAL))


def test_partial_rollout_stops_at_its_budget_and_finishes_what_is_due():
    # 2 responses of 100 and 10 tokens; a budget of 15: the run ends when the short one completes (20 tokens), and the
    # long one, parked at version 0, is due at version 1 because 1 + u > A = S = 1
    setting = replace(PLAIN, steps=2, learn=math.inf, update_seconds=2.0, budget=15)
    outcome = loops.synchronous(setting, [[100], [10], [10], [10]])
    assert outcome.rollouts == [[1], [0, 2, 3]]
    assert outcome.seconds == near(1 + 2 + 9 + 2)
    assert outcome.staleness_max == 1


# lengths


def test_the_lognormal_has_its_tail_and_mean():
    lengths = command.LogNormal(1000, limit=10**9, between=0.3)
    flat = sorted(length for group in lengths.groups(20_000, 4, seed=1) for length in group)
    assert flat[len(flat) // 2] == pytest.approx(1000, rel=0.03)
    assert flat[int(0.99 * len(flat))] == pytest.approx(10_000, rel=0.06)
    assert sum(flat) / len(flat) == pytest.approx(lengths.mean, rel=0.03)


def test_the_mean_is_that_after_the_cut():
    lengths = command.LogNormal.with_mean(3500, limit=8192)
    assert lengths.mean == pytest.approx(3500)
    flat = [length for group in lengths.groups(20_000, 4, seed=1) for length in group]
    assert sum(flat) / len(flat) == pytest.approx(3500, rel=0.02)
    assert sum(length == 8192 for length in flat) / len(flat) == pytest.approx(lengths.cut, rel=0.05)


def test_responses_of_a_prompt_are_alike():
    def within(between):
        groups = command.LogNormal(1000, limit=10**9, between=between).groups(4000, 2, seed=0)
        logs = [(math.log(a) - math.log(b)) ** 2 / 2 for a, b in groups]
        return sum(logs) / len(logs)

    sigma = math.log(10) / 2.3263
    assert within(0.0) == pytest.approx(sigma**2, rel=0.1)
    assert within(0.75) == pytest.approx(0.25 * sigma**2, rel=0.1)


def test_lengths_come_from_a_file(tmp_path):
    file = tmp_path / "lengths.json"
    file.write_text("[5, 7]")
    assert {n for group in command.read_lengths(file).groups(50, 2, seed=0) for n in group} == {5, 7}
    file.write_text("[[5, 6], [7, 8]]")
    assert {tuple(group) for group in command.read_lengths(file).groups(50, 2, seed=0)} == {(5, 6), (7, 8)}
    file.write_text('{"lengths": 3}')
    with pytest.raises(ValueError, match="must hold a list of lengths"):
        command.read_lengths(file)


def test_a_run_is_simulated_as_slowly_as_it_was():
    run = COMPARED / "reuse-2" / "grpo" / "seed-0"
    measured = command.read_run(run)
    timing = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
    assert measured.seconds == pytest.approx(sum(line["seconds"] for line in timing) / len(timing))
    s, observed = command.of_run(measured, engines=2)
    lengths = observed.groups(s.steps * s.prompts, s.responses, seed=0)
    outcome = loops.synchronous(s, lengths, together=True)
    assert outcome.step_seconds == pytest.approx(measured.rollout_seconds + measured.learn_seconds, rel=0.01)


# the command


def test_the_command_prints_equal_tables_for_equal_seeds():
    given = ("--scenario", "7b-32k", "--steps", 4, "--prompts", 8)
    first, second, other = (script(ROOT / "tools" / "async_schedule.py", *given, "--seed", seed) for seed in (0, 0, 1))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout != other.stdout
    assert "| together | 8 |" in first.stdout
    assert "1.00x |" in first.stdout


def test_the_command_shows_a_run_beside_its_simulation():
    run = COMPARED / "reuse-2" / "grpo" / "seed-0"
    result = script(ROOT / "tools" / "async_schedule.py", "--run", run, "--engines", 2)
    assert result.returncode == 0, result.stderr
    assert f"| together, measured {command.read_run(run).seconds:.3g} s | 2 |" in result.stdout


def test_the_page_shows_what_the_command_prints():
    """One row of docs/reference/sizes.md is simulated again, with the division of the GPUs that it names."""
    page = (ROOT / "docs" / "reference" / "sizes.md").read_text()
    section = page.split("### 7B, 8 GPUs, 32k\n")[1].split("###")[0]
    shown = next(line for line in section.splitlines() if line.startswith("| asynchronous, ahead 2, S 16 |"))
    scenario = command.SCENARIOS["7b-32k"].changed(ahead=2, staleness=16)
    lengths = scenario.lengths.groups(40 * 64, 8, command.SEED)
    outcome = loops.asynchronous(scenario.split(int(shown.split("|")[2])), lengths)
    assert shown == command.ahead_row(outcome, *command.bases_of(scenario, lengths))


def test_the_command_says_what_is_wrong(tmp_path):
    result = script(ROOT / "tools" / "async_schedule.py", "--run", tmp_path)
    assert result.returncode != 0
    assert "timing.jsonl" in result.stderr
