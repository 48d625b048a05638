"""Privacy audits: tests of a privacy claim against the code that runs, and against its records."""
