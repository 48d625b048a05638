"""Learning processes (DP-FedAvg, DP-FedSGD), their models and data, and server optimizers."""
