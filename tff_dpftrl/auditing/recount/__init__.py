"""A recount of a run: everything that its statement says, derived again from its records.

It shares nothing with the code that wrote them: files are read with `json`, `sqlite3` and NumPy,
participation is counted, sensitivities and ε are computed, and fingerprints are taken here.
"""
