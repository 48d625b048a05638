"""What an operator sees of a server: counts in memory, Prometheus metrics, a status page."""
