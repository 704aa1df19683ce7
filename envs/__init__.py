"""Environments: plain NumPy and Gymnasium, without heliostat and without Ray."""
