"""`python -m gpufaas.dashboards`: writes deploy/grafana/dashboards/."""

import sys
from collections.abc import Mapping
from pathlib import Path

from gpufaas.dashboards.functions_dashboard import FUNCTIONS
from gpufaas.dashboards.gpus_dashboard import GPUS
from gpufaas.dashboards.grafana_json import Dashboard, as_json
from gpufaas.dashboards.overview_dashboard import OVERVIEW

FOLDER = Path("deploy/grafana/dashboards")
DASHBOARDS: Mapping[str, Dashboard] = {
    "overview.json": OVERVIEW,
    "gpus.json": GPUS,
    "functions.json": FUNCTIONS,
}


def main() -> int:
    """Write the dashboards into the folder of Grafana's provisioning."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, dashboard in DASHBOARDS.items():
        (FOLDER / name).write_text(as_json(dashboard), encoding="utf-8")
        print(FOLDER / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
