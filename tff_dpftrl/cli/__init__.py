"""The command `tff-dpftrl`; each subcommand is a module."""
