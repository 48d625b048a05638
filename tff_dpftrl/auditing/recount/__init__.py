"""Everything that a run's statement says, derived again from the run's own records.

It shares nothing with the code that wrote them: files are read with `json`, `sqlite3` and NumPy,
participation is counted, sensitivities and ε are computed, and fingerprints are taken here.
"""
