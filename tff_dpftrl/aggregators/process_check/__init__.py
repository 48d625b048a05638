"""How `check_process` follows the values of clients through a compiled process."""
