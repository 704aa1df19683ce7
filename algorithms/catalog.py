"""The catalogue: workload name -> import path, strings only, so that reading it costs nothing."""

CATALOG: dict[str, str] = {
    "lmrl": "algorithms.lmrl.workload:WORKLOAD",
    "rllib": "algorithms.rllib.workload:WORKLOAD",
    "t1": "algorithms.t1.workload:WORKLOAD",
}
