"""One config to a whole run: plan, process, rounds, ledger, checkpoints, results."""
