"""What follows from a run's record: money spent, and how much of the work and the time was of use (goodput)."""

from datetime import datetime
from typing import Any


def derived_fields(record: dict[str, Any], hardware: dict[str, Any] | None = None) -> dict[str, Any]:
    """`goodput`, and `cost` where the hardware has a price; to be merged into the record whenever it is written.

    Args:
        hardware: configs/hardware/<instance>.yaml as a dict.
    """
    fields: dict[str, Any] = {"goodput": goodput(record)}
    if hardware and hardware.get("price_per_hour_usd") is not None:
        fields["cost"] = cost(record, hardware)
    return fields


def running_seconds(record: dict[str, Any]) -> float:
    """From start to the last sign of life, without the time between an end and the start after it."""
    alive = _between(record.get("started_at"), record.get("finished_at") or record.get("updated_at"))
    pauses = [restart.get("downtime_s") or restart.get("idle_s") or 0.0 for restart in record.get("restarts", [])]
    return max(alive - sum(pauses), 0.0)


def cost(record: dict[str, Any], hardware: dict[str, Any]) -> dict[str, Any]:
    """All nodes, for as long as the run ran, at the price given."""
    price = float(hardware["price_per_hour_usd"])
    usd = price * (record.get("num_nodes") or 1) * running_seconds(record) / 3600
    epochs = record.get("epochs") or 0
    return {
        "usd": round(usd, 4),
        "usd_per_epoch": round(usd / epochs, 4) if epochs else None,
        "price_per_hour": price,
        "instance": hardware.get("name"),
    }


def goodput(record: dict[str, Any]) -> dict[str, float | None]:
    """`steps`: kept steps over all that were computed. `wall`: seconds spent on kept steps over all seconds.

    Start-up, evaluation, downtime and steps that a crash undid count against `wall`.
    """
    kept = record.get("steps") or 0
    lost = sum(restart.get("lost_steps") or 0 for restart in record.get("restarts", []))
    if not kept:
        return {"steps": None, "wall": None}
    wall = _between(record.get("started_at"), record.get("finished_at") or record.get("updated_at"))
    wall -= sum(restart.get("idle_s") or 0.0 for restart in record.get("restarts", []))
    step_s = ((record.get("throughput") or {}).get("step_seconds") or {}).get("mean")
    useful_s = kept * step_s if step_s else None
    return {
        "steps": round(kept / (kept + lost), 4),
        "wall": round(min(useful_s / wall, 1.0), 4) if useful_s is not None and wall > 0 else None,
    }


def _between(earlier: str | None, later: str | None) -> float:
    if not earlier or not later:
        return 0.0
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
