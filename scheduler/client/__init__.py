"""Clients of the scheduler service for other processes: functions' gateways and people's tools."""
