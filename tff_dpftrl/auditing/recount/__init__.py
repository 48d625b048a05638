"""A recount of a run: everything that its statement says, derived again from its records.

It is not the code that wrote them: files are read with `json`, `sqlite3` and NumPy, participation
is counted, sensitivities and ε are computed, and fingerprints are taken here. Shared are the ε of
`bins` and `b-min-sep` sampling, which `accounting` computes, and the statement's sentences.
"""
