"""participation."""
