"""Accounting of samples that the server draws: what secrecy of who takes part is worth."""
