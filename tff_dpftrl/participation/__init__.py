"""Who takes part, when: schema, cohorts, timer, and the ledger of what happened."""
