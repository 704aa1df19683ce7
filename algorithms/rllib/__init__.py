"""RLlib's algorithms as workloads like any other."""
