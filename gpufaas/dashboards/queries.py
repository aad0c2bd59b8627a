"""PromQL expressions that several panels use."""

from gpufaas.dashboards.grafana_json import PromQuery

_WINDOW = "[$__rate_interval]"


def rate(metric: str, *by: str, where: str = "") -> str:
    """A counter's increase a second, summed by labels."""
    return f"{_sum(by)}(rate({metric}{_braced(where)}{_WINDOW}))"


def rate_or_none(metric: str, where: str = "") -> str:
    """A counter's total increase a second; 0 if it was never counted."""
    return f"{rate(metric, where=where)} or vector(0)"


def mean(metric: str, *by: str, where: str = "") -> str:
    """A histogram's mean."""
    return (
        f"{rate(f'{metric}_sum', *by, where=where)} / {rate(f'{metric}_count', *by, where=where)}"
    )


def quantiles(metric: str, *by: str, where: str = "", legend: str = "") -> tuple[PromQuery, ...]:
    """Median, 90th and 99th percentile of a histogram."""
    buckets = rate(f"{metric}_bucket", "le", *by, where=where)
    return tuple(
        PromQuery(f"histogram_quantile({quantile}, {buckets})", f"{legend} {name}".strip())
        for quantile, name in ((0.5, "median"), (0.9, "90 %"), (0.99, "99 %"))
    )


def share(metric: str, part: str, *by: str, where: str = "") -> str:
    """The share with label `part`; 0 if it was never counted."""
    whole = rate(metric, *by, where=where)
    both = f"{part},{where}" if where else part
    return f"({rate(metric, *by, where=both)} or 0 * {whole}) / ({whole} > 0)"


def _sum(by: tuple[str, ...]) -> str:
    return f"sum by ({', '.join(by)}) " if by else "sum"


def _braced(where: str) -> str:
    return f"{{{where}}}" if where else ""
