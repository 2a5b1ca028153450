"""What the history of a run says about restarts of its actors."""

import pytest

from bapo.runs import history
from bapo.runs.history import LEARNER, Restart, record_restart, restarts

DIED = "rollout 1 on a (10.0.0.2) died"


def test_restarts_are_recorded_with_their_step_and_counted_over_every_resume(tmp_path):
    history.record(tmp_path, "start", id="one", step=0)
    record_restart(tmp_path, Restart("rollout 1", DIED, responses=3, tokens=40), step=2)
    record_restart(tmp_path, Restart(LEARNER, "learner 0 died", updates=5), step=2)
    history.record(tmp_path, "resume", id="one", step=2)
    record_restart(tmp_path, Restart("rollout 1", DIED), step=7)
    assert restarts(tmp_path) == {"learner": 1, "rollout 1": 2}
    found = [{k: v for k, v in line.items() if k != "time"} for line in history.read(tmp_path)]
    assert found[1] == {
        **{"event": "restart", "step": 2, "who": "rollout 1", "why": DIED},
        **{"responses": 3, "tokens": 40},
    }
    assert found[2] == {"event": "restart", "step": 2, "who": "learner", "why": "learner 0 died", "updates": 5}
    assert all(line["time"] for line in history.read(tmp_path))
    assert history.identity(tmp_path) == "one"


def test_a_run_without_a_history_has_no_restarts(tmp_path):
    assert restarts(tmp_path) == {}


@pytest.mark.parametrize(
    ("restart", "line"),
    [
        (
            Restart("rollout 1", "gone", responses=3, tokens=40),
            "rollout 1 is replaced, and others go on with its 3 responses (40 tokens already streamed): gone",
        ),
        (
            Restart("rollout 1", "gone", responses=1, tokens=1),
            "rollout 1 is replaced, and others go on with its 1 response (1 token already streamed): gone",
        ),
        (
            Restart("rollout 1", "gone", responses=2),
            "rollout 1 is replaced, and others go on with its 2 responses (0 tokens already streamed): gone",
        ),
        (Restart("rollout 1", "gone"), "rollout 1, which had no responses, is replaced: gone"),
        (Restart(LEARNER, "gone", updates=1), "all learner ranks start again, with 1 update to repeat: gone"),
        (Restart(LEARNER, "gone"), "all learner ranks start again, with 0 updates to repeat: gone"),
    ],
)
def test_a_restart_is_one_sentence(restart, line):
    assert restart.line() == line
