"""A population's server on one machine: actors on asyncio, devices over gRPC and TLS."""
