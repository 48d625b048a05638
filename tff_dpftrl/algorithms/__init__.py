"""DP-FedAvg and DP-FedSGD with sampled clients, and the DP-FTRL server update."""
