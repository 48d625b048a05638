"""Sizes and sensitivities of the discretisation that secure aggregation needs."""
