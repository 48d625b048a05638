"""Many simulated devices in few processes, with the real protocol, for trying a server out."""
