"""Causal LMs: loading and saving, the fused log-prob head, parameter averages, tiny models and their cold start."""
