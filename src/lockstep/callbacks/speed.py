"""Measure the speed of training: seconds of a step, and their share that waits for data."""

import time

from lockstep.callbacks.distribution import Distribution


class Speed:
    """Measure intervals of optimizer steps; validations and checkpoints between them do not count.

    The first step of a start also compiles and warms up, and counts in no interval.
    """

    def __init__(self) -> None:
        self.step_seconds = Distribution()  # mean of each interval
        self.steps = 0
        self.seconds = 0.0
        self.wait_s = 0.0
        self.begin_interval(0)

    def begin_interval(self, step: int) -> None:
        """Start to measure at the start of the next batch: the wait for it does not count."""
        self.began_step = step
        self.began_at = time.monotonic()
        self.interval_wait_s = 0.0
        self.batch_ended_at: float | None = None

    def start_batch(self) -> None:
        """Count the wait for this batch."""
        now = time.monotonic()
        if self.batch_ended_at is None:
            self.began_at = now
        else:
            self.interval_wait_s += now - self.batch_ended_at

    def end_batch(self) -> None:
        """Remember when the wait for the next batch begins."""
        self.batch_ended_at = time.monotonic()

    def end_interval(self, step: int) -> float:
        """Count the interval up to this step; return its steps per second."""
        steps = step - self.began_step
        seconds = time.monotonic() - self.began_at
        self.step_seconds.add(seconds / steps)
        self.steps += steps
        self.seconds += seconds
        self.wait_s += self.interval_wait_s
        return steps / seconds

    def summary(self, global_batch_size: int, num_devices: int) -> dict[str, object]:
        """Return images per second and seconds of a step over all intervals."""
        mean_s = self.seconds / self.steps
        images_per_s = global_batch_size / mean_s
        return {
            "images_per_s": round(images_per_s, 2),
            "images_per_s_per_device": round(images_per_s / num_devices, 2),
            "step_seconds": {
                "p50": round(self.step_seconds.quantile(0.5), 6),
                "p95": round(self.step_seconds.quantile(0.95), 6),
                "mean": round(mean_s, 6),
            },
            "data_wait_share": round(min(self.wait_s / self.seconds, 1.0), 4),
        }
