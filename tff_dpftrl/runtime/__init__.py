"""The federated-learning runtime: plans, protocol, server and devices (Bonawitz et al. 2019)."""
