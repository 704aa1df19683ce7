"""T1: reinforcement learning for reasoning at scale (arXiv 2501.11651)."""
