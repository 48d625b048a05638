"""The process of a noise party: a second operator who holds the noise of a task, and no data."""
