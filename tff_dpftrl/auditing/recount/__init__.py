"""A recount of a run: everything that its statement says, derived again from its records.

This code is separate from the code that wrote the records. It reads files with `json`, `sqlite3`
and NumPy, counts participation, computes sensitivities and ε, and takes fingerprints. It shares
only the statement's sentences and the ε of `bins` and `b-min-sep` sampling, from `accounting`.
"""
