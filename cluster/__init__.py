"""Commands: what users type, and what they read afterwards."""
