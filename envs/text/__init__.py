"""Multi-turn text games of LMRL-Gym (arXiv 2311.18232), stepped for many episodes at once."""
