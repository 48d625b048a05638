"""Load simulation: many simulated devices in few processes, over the server's real protocol."""
