"""Participation of clients: schemas, cohorts, a device timer, and the ledger of a run."""
