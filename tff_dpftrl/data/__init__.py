"""Text keyed by user: corpora, tokens, splits, client datasets and a baseline."""
