"""Text keyed by user: corpora, tokens, vocabularies, splits and client datasets."""
