"""Numbers as a reader wants them; an en dash where there is none."""

NONE = "–"
NB = "\N{NO-BREAK SPACE}"  # a number and its unit stay on one line


def percent(share: float | None, digits: int = 2) -> str:
    """0.9722 as `97.22 %`."""
    return NONE if share is None else f"{share * 100:.{digits}f}{NB}%"


def decimal(value: float | None, digits: int = 4) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def figure(value: float | None) -> str:
    """Of a scale that nobody here knows: four digits."""
    return NONE if value is None else f"{value:.4g}"


def whole(value: float | None) -> str:
    return NONE if value is None else f"{round(value):,}"


def rate(value: float | None) -> str:
    """Three digits at least: 9.81, 98.1, 12,345."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def gib(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.2f}{NB}GiB" if value < 100 else f"{value:.0f}{NB}GiB"


def megabytes(num_bytes: float | None) -> str:
    return NONE if num_bytes is None else f"{num_bytes / 1e6:,.1f}{NB}MB"


def milliseconds(seconds: float | None) -> str:
    return NONE if seconds is None else f"{rate(seconds * 1000)}{NB}ms"


def dollars(value: float | None) -> str:
    if value is None:
        return NONE
    return f"${value:.2f}" if value >= 0.1 or value == 0 else f"${value:.2g}"


def duration(seconds: float | None) -> str:
    """48 s, 4 min 12 s, 3 h 07 min, 2 d 04 h."""
    if seconds is None or seconds < 0:
        return NONE
    if seconds < 9.95:
        return f"{seconds:.1f}{NB}s"
    total = round(seconds)
    if total < 60:
        return f"{total}{NB}s"
    if total < 3600:
        return f"{total // 60}{NB}min{NB}{total % 60:02d}{NB}s"
    if total < 48 * 3600:
        return f"{total // 3600}{NB}h{NB}{total % 3600 // 60:02d}{NB}min"
    return f"{total // 86400}{NB}d{NB}{total % 86400 // 3600:02d}{NB}h"


def ratio(value: float | None, base: float | None) -> str:
    """How many times the base: ×0.52; nothing where either is missing."""
    if value is None or not base:
        return ""
    quotient = value / base
    return f"×{quotient:.2f}" if quotient < 100 else f"×{quotient:,.0f}"


def points(value: float | None, base: float | None) -> str:
    """The difference of two shares in percentage points."""
    return "" if value is None or base is None else f"{(value - base) * 100:+.2f}"
