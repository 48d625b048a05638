"""Monitoring of a server: counters in memory, Prometheus metrics, alerts, and a status page."""
