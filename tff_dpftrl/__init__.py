"""Differentially private federated learning without sampling assumptions."""
