"""Who leads a population, and what its tasks have committed.

`interface` holds the laws (leases with epochs, commits by compare-and-swap), `sql` keeps
them in SQLite or PostgreSQL, `memory` in one process; `digests` finds damaged rows. Nothing about
a device is kept.
"""
