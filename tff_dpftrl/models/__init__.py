"""Language models, n-gram baselines, metrics, evaluation and export, without TFF."""
