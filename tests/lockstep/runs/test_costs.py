from lockstep.runs.costs import cost, derived_fields, goodput, running_seconds

RECORD = {
    "started_at": "2026-01-01T00:00:00Z", "finished_at": "2026-01-01T02:00:00Z", "num_nodes": 4, "epochs": 5,
    "steps": 900, "throughput": {"step_seconds": {"mean": 6.0}},
    "restarts": [{"lost_steps": 60, "downtime_s": 1200.0}, {"lost_steps": 40, "downtime_s": 600.0}],
}  # fmt: skip


def test_downtime_is_not_paid():
    assert running_seconds(RECORD) == 5400
    assert cost(RECORD, {"name": "g4dn.xlarge", "price_per_hour_usd": 0.526}) == {
        "usd": 3.156, "usd_per_epoch": 0.6312, "price_per_hour": 0.526, "instance": "g4dn.xlarge",
    }  # fmt: skip


def test_goodput_counts_lost_steps_and_all_other_time():
    assert goodput(RECORD) == {"steps": 0.9, "wall": 0.75}
    assert goodput({"started_at": "2026-01-01T00:00:00Z"}) == {"steps": None, "wall": None}


def test_no_price_no_cost():
    assert "cost" not in derived_fields(RECORD, {"name": None, "price_per_hour_usd": None})
    assert derived_fields(RECORD, {"name": "local", "price_per_hour_usd": 0.0})["cost"]["usd"] == 0.0


def test_a_run_that_is_made_longer_was_not_down_in_between():
    made_longer = {**RECORD, "restarts": [{"lost_steps": 0, "downtime_s": None, "idle_s": 1800.0}]}
    assert running_seconds(made_longer) == 5400
    assert goodput(made_longer) == {"steps": 1.0, "wall": 1.0}
