"""LMRL-Gym (arXiv 2311.18232): six ways to learn multi-turn text games."""
