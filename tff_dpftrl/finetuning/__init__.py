"""Fine-tuning with user-level privacy where all data lies in one place: ELS, ULS, a choice."""
