"""`python -m gpufaas.dashboards`: writes deploy/grafana/dashboards/."""

import sys
from collections.abc import Mapping
from pathlib import Path

from gpufaas.dashboards.functions import FUNCTIONS
from gpufaas.dashboards.gpus import GPUS
from gpufaas.dashboards.overview import OVERVIEW
from gpufaas.dashboards.panels import Dashboard, as_json

FOLDER = Path("deploy/grafana/dashboards")
DASHBOARDS: Mapping[str, Dashboard] = {
    "overview.json": OVERVIEW,
    "gpus.json": GPUS,
    "functions.json": FUNCTIONS,
}


def main() -> int:
    """Write them where Grafana's provisioning finds them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, dashboard in DASHBOARDS.items():
        (FOLDER / name).write_text(as_json(dashboard), encoding="utf-8")
        print(FOLDER / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
