"""Does the running code keep the promise that it prints? Lower bounds on what it leaks."""
