"""CSV files of a run folder: what is read, what is thinned away, what is passed over."""

import pytest

from lockstep.pages.curves import confusion_matrix, hardware_curves, shortened, thin, training_curves
from lockstep.pages.facts import RunFacts
from lockstep.pages.figures import seconds_at


def test_metrics_become_one_curve_each_without_gaps(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text(
        "step,epoch,time_s,train/loss,val/acc\n10,0,1.5,2.25,\n20,0,3.0,nan,0.5\n30,1,4.5,1.123456789,\n40,1"
    )
    assert training_curves(path) == {
        "epoch": [[10, 20, 30, 40], [0, 0, 1, 1]],
        "time_s": [[10, 20, 30], [1.5, 3, 4.5]],
        "train/loss": [[10, 30], [2.25, 1.1235]],
        "val/acc": [[20], [0.5]],
    }


def test_the_seconds_of_older_records_go_on_over_a_restart():
    source = {"run_id": "r", "record": {}, "curves": {"time_s": [[10, 20, 30, 40, 50], [1, 3.5, 2, 4, 1]]}}
    run = RunFacts(source)
    assert run.curve("time_s") == ([10, 20, 30, 40, 50], [1, 3.5, 5.5, 7.5, 8.5])
    assert seconds_at(run, ([20, 40], [0.5, 0.6])) == ([3.5, 7.5], [0.5, 0.6])


@pytest.mark.parametrize("content", [b"", b"step\n", b"\xff\xfe\x00garbage", b"loss\n1\n", b'step,"loss\n1,2\n'])
def test_a_broken_file_gives_no_curve(tmp_path, content):
    (tmp_path / "metrics.csv").write_bytes(content)
    assert training_curves(tmp_path / "metrics.csv") == {}


def test_there_is_no_file(tmp_path):
    assert training_curves(tmp_path / "none.csv") == {} and confusion_matrix(tmp_path / "none.csv") is None


def test_thinning_keeps_the_ends_and_every_spike():
    x, y = list(range(10_000)), [0.0] * 10_000
    y[4321], y[8765], y[-1] = 9.0, -9.0, 0.5
    thin_x, thin_y = thin(x, y, 160)
    assert len(thin_x) <= 160 and thin_x == sorted(thin_x)
    assert {(0, 0.0), (4321, 9.0), (8765, -9.0), (9999, 0.5)} <= set(zip(thin_x, thin_y))
    assert thin(x[:160], y[:160], 160) == (x[:160], y[:160])


def test_numbers_are_shortened():
    assert [shortened(v) for v in (0.123456789, 3.0, float("inf"), 1.23456789e-9)] == [0.12346, 3, None, 1.2346e-09]


def moment(second):
    return f"2026-11-20T23:{50 + second // 60:02d}:{second % 60:02d}Z" if second < 600 else (
        f"2026-11-21T00:{second // 60 - 10:02d}:{second % 60:02d}Z"
    )  # fmt: skip


def test_a_restart_goes_on_where_the_samples_ended(tmp_path):
    (tmp_path / "a.csv").write_text("time,cpu/percent\n2026-11-20T23:59:59Z,3\n")
    (tmp_path / "b.csv").write_text("time,gpu0/power_w,cpu/percent\n2026-11-21T00:00:09Z,300,5\n")
    (node,) = hardware_curves([[tmp_path / "a.csv", tmp_path / "b.csv"]])
    assert node["series"] == {"cpu/percent": [[0, 10], [3, 5]], "gpu0/power_w": [[10], [300]]}


@pytest.mark.parametrize("time", ["", "yesterday", "2026-13-01T00:00:00Z", "9" * 400])
def test_a_sample_without_a_time_is_left_out(tmp_path, time):
    (tmp_path / "a.csv").write_text(f"time,cpu/percent\n{time},3\n2026-11-20T23:50:00Z,5\n")
    assert hardware_curves([[tmp_path / "a.csv"]])[0]["series"] == {"cpu/percent": [[0], [5]]}


def test_hardware_is_averaged_and_its_percentiles_are_of_all_samples(tmp_path):
    lines = ["time,gpu0/utilisation_percent"] + [f"{moment(t)},{100 if t >= 100 else 0}" for t in range(1000)]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    (node,) = hardware_curves([[tmp_path / "a.csv"]])
    times, values = node["series"]["gpu0/utilisation_percent"]
    assert len(times) == 120 and values[0] == 0 and values[-1] == 100
    assert times[0] < 8 and 990 < times[-1] < 1000
    assert node["stats"]["gpu0/utilisation_percent"] == {"p10": 100, "p50": 100, "p90": 100, "max": 100}


def test_many_devices_share_the_room(tmp_path):
    names = ",".join(f"gpu{i}/utilisation_percent" for i in range(64))
    rows = [f"{moment(t)}," + ",".join(["50"] * 64) for t in range(300)]
    paths = []
    for node in range(8):
        paths.append(tmp_path / f"{node}.csv")
        paths[-1].write_text("\n".join([f"time,{names}", *rows]))
    nodes = hardware_curves([[path] for path in paths])
    assert sum(len(x) for node in nodes for x, _ in node["series"].values()) <= 64 * 8 * 17


@pytest.mark.parametrize(
    "text, names",
    [
        ("8,2\n1,9\n", []),
        ("cat,dog\n8,2\n1,9\n", ["cat", "dog"]),
        ("true \\ predicted,cat,dog\ncat,8,2\ndog,1,9\n", ["cat", "dog"]),
        ("0,1\n8,2\n1,9\n", ["0", "1"]),
        (",0,1\n0,8,2\n1,1,9\n", ["0", "1"]),
    ],
)
def test_confusion_counts_with_and_without_names(tmp_path, text, names):
    (tmp_path / "c.csv").write_text(text)
    assert confusion_matrix(tmp_path / "c.csv") == {"names": names, "counts": [[8, 2], [1, 9]]}


@pytest.mark.parametrize("text", ["", "1,2\n3\n", "1,-2\n3,4\n", "a,b\n", "1,x\n3,4\n5,6\n7,8\n"])
def test_what_is_no_confusion_matrix(tmp_path, text):
    (tmp_path / "c.csv").write_text(text)
    assert confusion_matrix(tmp_path / "c.csv") is None
