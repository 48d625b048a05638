"""Where TFF computations run: contexts, transfer of state, the life of worker processes."""
