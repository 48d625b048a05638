"""Language models, their metrics, and evaluation without TFF."""
