import json

import pytest

from bapo.buffer import Buffer
from bapo.cli import run
from bapo.rollout.engine import Sampling, Segment
from bapo.rollout.scheduler import Scheduler, new_group
from bapo.runs.ledger import Ledger, balance, in_state, read
from bapo.types import Problem, Status


def events(*told):
    ledger = Ledger()
    for event, group, *facts in told:
        ledger.record(event, group, **(facts[0] if facts else {}))
    return ledger.take()


GOOD = [
    ("admitted", 0), ("admitted", 1), ("admitted", 2), ("admitted", 3), ("admitted", 4),
    ("finished", 1), ("finished", 0), ("dropped", 2), ("finished", 3),
    ("held", 0, {"oldest": 4}), ("filtered", 1), ("unscored", 3),
    ("trained", 0, {"version": 5, "uses": 0}), ("trained", 0, {"version": 6, "uses": 1}), ("retired", 0),
]  # fmt: skip


def test_equal_events_in_a_row_share_a_line():
    lines = events(*GOOD)
    assert lines[0] == {"event": "admitted", "groups": [0, 1, 2, 3, 4]}
    assert {"event": "trained", "version": 6, "groups": [0], "uses": [1]} in lines
    assert {"event": "held", "groups": [0], "oldest": [4]} in lines


def test_a_good_ledger_balances():
    found = balance(events(*GOOD), max_staleness=2)
    assert found.wrong == []
    assert found.states == {"retired": 1, "filtered": 1, "dropped": 1, "unscored": 1, "admitted": 1}
    assert (found.uses, found.stalest) == (2, 2)
    assert "5 groups" in found.line()
    assert found.line().endswith("it balances")
    assert in_state(events(*GOOD), "admitted") == {4}


def test_every_kind_of_mistake_is_named():
    def wrong(*more, bound=None):
        return [str(found) for found in balance(events(*GOOD, *more), max_staleness=bound).wrong]

    assert wrong(("admitted", 4)) == ["group 4 is admitted, but was admitted before"]
    assert wrong(("trained", 4, {"version": 7, "uses": 0}))[0] == "group 4 is trained, but was admitted before"
    assert wrong(("finished", 9))[0] == "group 9 is finished, but was never admitted before"
    assert "group 5 was never admitted" in wrong(("admitted", 6))
    assert wrong(bound=1) == ["group 0 is trained on above the staleness bound of 1: at age 2, at version 6"]
    again = ("held", 0, {"oldest": 4}), ("trained", 0, {"version": 6, "uses": 2})
    assert "group 0 is trained on twice in one update, at version 6" in wrong(*again)
    miscounted = wrong(("trained", 0, {"version": 7, "uses": 0}))
    assert "group 0 is trained on with a wrong number of uses: 0 instead of 2, at version 7" in miscounted


def test_a_skipped_update_takes_its_uses_back():
    told = [
        *(("admitted", 0), ("finished", 0), ("held", 0, {"oldest": 4})),
        ("trained", 0, {"version": 5, "uses": 0}),
        ("trained", 0, {"version": 6, "uses": 1}),
        ("skipped", 0, {"version": 6}),
        ("trained", 0, {"version": 7, "uses": 1}),
        *(("retired", 0), ("skipped", 0, {"version": 7})),
    ]
    found = balance(events(*told), max_staleness=3)
    assert found.wrong == []
    assert (found.states, found.uses, found.stalest) == ({"retired": 1}, 1, 1)
    assert in_state(events(*told), "retired") == {0}
    (again,) = balance(events(*told, ("skipped", 0, {"version": 7}))).wrong
    assert str(again) == "group 0 is skipped in an update that has not used it, at version 7"
    counted = [entry for entry in told if entry[0] != "skipped"]
    assert [*map(str, balance(events(*counted)).wrong)] == [
        "group 0 is trained on with a wrong number of uses: 1 instead of 2, at version 7"
    ]


def test_nothing_may_be_under_way_at_the_end():
    lines = events(*GOOD, ("admitted", 5), ("finished", 5))
    assert balance(lines).wrong == []
    assert [*map(str, balance(lines, ended=True).wrong)] == ["group 5 is still waiting for a rollout at the end"]
    told = [*map(str, balance(lines, ended=True, all_used=True).wrong)]
    assert "group 4 is still in progress at the end" in told


def test_scheduler_and_buffer_tell_the_whole_story(tmp_path):
    ledger = Ledger()
    scheduler = Scheduler(Sampling(), max_response_tokens=4, record=ledger.record)
    buffer = Buffer(batch_groups=1, reuse=2, max_staleness=4, record=ledger.record)
    groups = [new_group(id, Problem(str(id), "2+2=", 4), [1, 2], responses=2, seed=0) for id in range(3)]
    scheduler.admit(groups)
    for request in scheduler.requests(0).requests:
        scheduler.accept(request.id, Segment([5], [-1.0], [0.5], [0], Status.STOPPED))
    for group in (finished := scheduler.take().groups):
        for index, trajectory in enumerate(group.trajectories):
            trajectory.reward = float(index if group.id else 0)  # group 0 has no signal
    buffer.add(finished, version=0)
    version = 0
    while isinstance(buffer.draw(version=version), list):
        version += 1
    lines = ledger.take()
    found = balance(lines, max_staleness=4)
    assert found.wrong == []
    assert found.states == {"filtered": 1, "retired": 2}
    assert (found.uses, found.stalest) == (4, 3)
    assert read(written(tmp_path, lines, bound=4)) == lines


def written(directory, lines, *, bound=2):
    (directory / "config.json").write_text(json.dumps({"offpolicy": {"max_staleness": bound}}))
    (directory / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_the_command_prints_what_became_of_the_groups(tmp_path, capsys):
    assert run(["ledger", str(written(tmp_path, events(*GOOD)))]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "5 groups (1 in progress, 1 dropped, 1 without a signal, 1 used up, 1 without rewards), trained on 2 times, at "
        "most 2 updates old; it balances"
    ]


def test_the_command_tells_each_kind_of_mistake_once_and_fails(tmp_path, capsys):
    many = [("finished", group) for group in range(10, 15)]
    assert run(["ledger", str(written(tmp_path, events(*GOOD, *many), bound=1))]) == 1
    line, *said = capsys.readouterr().out.splitlines()
    assert "; 11 entries do not add up: group" in line
    assert said == [
        "  5 times: a group is finished, but was never admitted before",
        "      group 10 is finished, but was never admitted before",
        "      group 11 is finished, but was never admitted before",
        "      group 12 is finished, but was never admitted before",
        "      and 2 more",
        "  5 times: a group was never admitted",
        "      group 5 was never admitted",
        "      group 6 was never admitted",
        "      group 7 was never admitted",
        "      and 2 more",
        "  1 time: a group is trained on above the staleness bound of 1",
        "      group 0 is trained on above the staleness bound of 1: at age 2, at version 6",
    ]


def test_half_a_line_at_the_end_is_left_out(tmp_path):
    lines = events(*GOOD)
    with (written(tmp_path, lines) / "ledger.jsonl").open("a") as file:
        file.write('{"event": "adm')
    assert read(tmp_path) == lines


@pytest.mark.parametrize(
    "damaged",
    [
        *("{", "[]", "7", "{}", '{"event": "lost", "groups": [1]}', '{"event": "held", "groups": [1], "oldest": []}'),
        *('{"event": "admitted", "groups": ["a"]}', '{"event": "admitted", "groups": 3}', "[" * 100_000),
        '{"event": "trained", "version": null, "groups": [0], "uses": [0]}',
    ],
)
def test_a_damaged_line_is_named(tmp_path, capsys, damaged):
    written(tmp_path, events(*GOOD))
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    (tmp_path / "ledger.jsonl").write_text("\n".join([lines[0], damaged, *lines[1:], ""]))
    assert run(["ledger", str(tmp_path)]) == 3
    assert f"{tmp_path / 'ledger.jsonl'}, line 2, is damaged" in capsys.readouterr().err


def test_a_directory_without_a_ledger_is_refused(tmp_path, capsys):
    assert run(["ledger", str(tmp_path)]) == 2
    assert f"{tmp_path} has no ledger. Name the directory of a run of `bapo train`" in capsys.readouterr().err
    assert run(["ledger", str(tmp_path / "nowhere")]) == 2
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "ledger.jsonl").write_text("")
    assert run(["ledger", str(tmp_path)]) == 3


def strange(directory, *lines, **config):
    (directory / "config.json").write_text(json.dumps({"offpolicy": {"max_staleness": 4}} | config))
    (directory / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["ledger", str(directory)]


def test_groups_that_are_missing_cost_no_memory(tmp_path, capsys):
    assert run(strange(tmp_path, {"event": "admitted", "groups": [0, 2, 3_000_000_000]})) == 1
    told = "".join(capsys.readouterr())
    assert "group 1 was never admitted" in told
    assert "10000 times: a group was never admitted" in told.replace(",", "")
    for id in (10**3999, -1, 2**53):
        assert run(strange(tmp_path, {"event": "admitted", "groups": [id]})) == 3
        assert "line 1, is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config",
    [{"cluster": []}, {"cluster": {"rollouts": "x"}}, {"offpolicy": {"max_staleness": "x"}}, {"offpolicy": []}],
)
def test_a_configuration_without_its_numbers_is_refused_with_words(tmp_path, capsys, config):
    assert run(strange(tmp_path, {"event": "admitted", "groups": [0]}, **config)) == 3
    assert "config.json is damaged" in capsys.readouterr().err


def test_groups_that_an_environment_cost_have_their_cause_on_lines_of_their_own():
    ledger = Ledger()
    for group in range(4):
        ledger.record("admitted", group)
    ledger.record("dropped", 0)
    ledger.record("dropped", 1, cause="environment failed: it broke")
    ledger.record("dropped", 2, cause="grader failed: no judge")
    ledger.record("dropped", 3)
    lines = ledger.take()
    assert lines[1:] == [
        {"event": "dropped", "groups": [0]},
        {"event": "dropped", "groups": [1, 2], "cause": ["environment failed: it broke", "grader failed: no judge"]},
        {"event": "dropped", "groups": [3]},
    ]
    assert balance(lines).wrong == []
