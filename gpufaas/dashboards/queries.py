"""Expressions that several panels are made of."""

from gpufaas.dashboards.panels import Query

_WINDOW = "[$__rate_interval]"


def rate(metric: str, *by: str, where: str = "") -> str:
    """A counter's increase a second, summed up by labels."""
    return f"{_sum(by)}(rate({metric}{_braced(where)}{_WINDOW}))"


def rate_or_none(metric: str, where: str = "") -> str:
    """The same in all, and 0 where it was never counted."""
    return f"{rate(metric, where=where)} or vector(0)"


def mean(metric: str, *by: str, where: str = "") -> str:
    """Of a histogram."""
    return (
        f"{rate(f'{metric}_sum', *by, where=where)} / {rate(f'{metric}_count', *by, where=where)}"
    )


def quantiles(metric: str, *by: str, where: str = "", legend: str = "") -> tuple[Query, ...]:
    """Median, 90th and 99th percentile of a histogram."""
    buckets = rate(f"{metric}_bucket", "le", *by, where=where)
    return tuple(
        Query(f"histogram_quantile({quantile}, {buckets})", f"{legend} {name}".strip())
        for quantile, name in ((0.5, "median"), (0.9, "90 %"), (0.99, "99 %"))
    )


def share(metric: str, part: str, *by: str, where: str = "") -> str:
    """What `part` has of all; 0 where it was never counted."""
    whole = rate(metric, *by, where=where)
    both = f"{part},{where}" if where else part
    return f"({rate(metric, *by, where=both)} or 0 * {whole}) / ({whole} > 0)"


def _sum(by: tuple[str, ...]) -> str:
    return f"sum by ({', '.join(by)}) " if by else "sum"


def _braced(where: str) -> str:
    return f"{{{where}}}" if where else ""
