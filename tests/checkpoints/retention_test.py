"""Which checkpoints stay: the newest, every m-th, the best and milestones."""

import pytest
from fault_checkpoints import FINGERPRINT, abstract, flip, restore_step, state_at

from t5x_diffeq.checkpoints.checkpoint import Checkpoints
from t5x_diffeq.checkpoints.checkpoint_folder import MILESTONE, Retention, whole_steps
from t5x_diffeq.checkpoints.restoring import find_step, restore_params
from t5x_diffeq.checkpoints.stored import RunFacts
from t5x_diffeq.system.errors import InputError


def save(workdir, steps, losses=(), **keys):
    """Saves these steps in a run of its own, and returns the steps that are there then."""
    with Checkpoints(workdir, Retention(**{"newest": 1, **keys})) as checkpoints:
        for step in steps:
            loss = dict(losses).get(step)
            checkpoints.save(step, state_at(step), RunFacts(FINGERPRINT, None, step, loss))
    return whole_steps(workdir / "checkpoints")


def test_the_newest_and_every_mth(tmp_path):
    assert save(tmp_path, [1, 2, 3, 4, 5, 6, 7], newest=2, every=3) == [3, 6, 7]
    assert save(tmp_path, [8], newest=1) == [8]  # the keys may change


def test_the_best_also_after_a_restart(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0, 5: float("nan"), 6: 2.0}
    assert save(tmp_path, [1, 2, 3], losses, best=2) == [2, 3]
    assert save(tmp_path, [4, 5], losses, best=2) == [2, 3, 5]
    assert save(tmp_path, [6, 7], losses, best=2) == [2, 6, 7]  # of equals, the newest
    assert find_step(tmp_path, "best") == 2
    assert restore_params(tmp_path, abstract(state_at(0).params), "best")[1] == 2


def test_a_damaged_loss_stops_nothing(tmp_path, capsys):
    """Orbax's own file of metrics would: its manager can't be made if one of them is damaged."""
    save(tmp_path, [1, 2, 3], {1: 3.0, 2: 1.0, 3: 2.0}, newest=3)
    path = tmp_path / "checkpoints" / "2" / "data" / "metadata"
    path.write_text(path.read_text()[:-9])
    assert find_step(tmp_path, "best") == 3
    assert save(tmp_path, [4], {4: 9.0}, newest=1, best=1) == [3, 4]


@pytest.mark.parametrize("content", ["[]", '{"eval_loss": "low"}', '{"eval_loss": true}'])
def test_other_json_in_place_of_a_loss(tmp_path, content):
    save(tmp_path, [1, 2], {1: 3.0, 2: 1.0}, newest=2)
    (tmp_path / "checkpoints" / "2" / "data" / "metadata").write_text(content)
    assert find_step(tmp_path, "best") == 1


def test_no_best_without_a_loss(saved):
    with pytest.raises(InputError, match=r"no checkpoint of .* give one of the steps 2, 4, 6, or"):
        find_step(saved, "best")


def test_milestones_stay(tmp_path):
    """Also once the key names them no more, and those that were saved before it named them."""
    assert save(tmp_path, [1, 2, 3, 4], milestones=(2,)) == [2, 4]
    assert save(tmp_path, [5, 6], milestones=(4,)) == [2, 4, 6]
    assert save(tmp_path, [7, 8]) == [2, 4, 8]
    (tmp_path / "checkpoints" / "2" / MILESTONE).unlink()
    assert save(tmp_path, [9]) == [4, 9]
    (tmp_path / "checkpoints" / "9" / MILESTONE).touch()  # by hand
    assert save(tmp_path, [10]) == [4, 9, 10]


def test_a_checkpoint_that_is_marked_while_the_run_trains_stays(tmp_path):
    with Checkpoints(tmp_path, Retention(newest=1)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state_at(step), RunFacts(FINGERPRINT, None, step, None))
            checkpoints.wait()
            if step == 1:
                (tmp_path / "checkpoints" / "1" / MILESTONE).touch()
    assert whole_steps(tmp_path / "checkpoints") == [1, 3]


def test_a_rollback_goes_to_the_newest_that_is_due():
    """After a branch from a run that was stopped, there may be none that is."""
    retention = Retention(newest=1, scheduled=5, milestones=(8,))
    assert retention.rollback_step([5, 8, 9]) == 8
    assert retention.rollback_step([7, 9]) == 7
    assert retention.rollback_step([]) is None


def test_a_damaged_milestone_is_kept_apart(tmp_path):
    save(tmp_path, [2, 4], milestones=(4,))
    save(tmp_path, [2], newest=2)
    flip(next((tmp_path / "checkpoints" / "4").rglob("ocdbt.process_0/d/*")))
    assert restore_step(tmp_path) == 2
    assert (tmp_path / "unreadable_checkpoints" / "4" / MILESTONE).exists()
