"""Learning processes of our own (DP-FedAvg, DP-FedSGD), and the DP-FTRL server optimizer."""
