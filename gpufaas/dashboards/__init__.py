"""Grafana's dashboards as code: `python -m gpufaas.dashboards` writes their JSON."""
