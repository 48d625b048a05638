"""Leases of populations and commits of their tasks, in a store that servers share.

`interface` defines the laws of a store: leases with epochs, and commits by compare-and-swap. `sql`
implements them in SQLite or PostgreSQL. `digests` finds damaged rows.
A store keeps nothing about devices.
"""
