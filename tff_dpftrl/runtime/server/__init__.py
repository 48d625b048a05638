"""The server of a population on one machine: actors on asyncio, devices over gRPC and TLS."""
