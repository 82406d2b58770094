"""Lightning's loop state, made from a place in plain words."""

from lockstep.callbacks.resume_point import EPOCH_END, TRAINING, VALIDATION, loop_state, resume_point

SAVED = {"state_dict": {}, "epoch_loop.automatic_optimization.optim_progress": {"kept": 1}}


def counts(part):
    assert part["total"] == part["current"]
    return tuple(part["current"][name] for name in ("ready", "started", "processed", "completed"))


def state(phase, done, accumulate=1, epoch=2):
    return loop_state(SAVED, resume_point(epoch, done, 20, phase), accumulate)


def test_mid_epoch_counts_micro_batches_of_the_new_accumulation():
    for accumulate in (1, 4):
        found = state(TRAINING, 7, accumulate)
        n = 7 * accumulate
        assert counts(found["epoch_loop.batch_progress"]) == (n, n, n, n - 1)
        assert counts(found["epoch_progress"]) == (3, 3, 2, 2)
        assert not found["epoch_loop.batch_progress"]["is_last_batch"]


def test_validation_starts_again_from_its_first_batch():
    found = state(VALIDATION, 20)
    assert counts(found["epoch_loop.batch_progress"]) == (20, 20, 20, 20)
    assert found["epoch_loop.batch_progress"]["is_last_batch"]
    assert counts(found["epoch_loop.val_loop.batch_progress"]) == (1, 1, 0, 0)


def test_an_ended_epoch_begins_the_next_one():
    found = state(EPOCH_END, 20)
    assert counts(found["epoch_progress"]) == (3, 3, 3, 3)
    assert counts(found["epoch_loop.batch_progress"]) == (0, 0, 0, 0)


def test_optimizer_progress_is_kept_and_the_saved_state_is_not_changed():
    found = state(TRAINING, 3)
    assert found["epoch_loop.automatic_optimization.optim_progress"] == {"kept": 1}
    assert "epoch_progress" not in SAVED
