"""The catalogue: workload name -> import path, strings only, so that reading it costs nothing."""

CATALOG: dict[str, str] = {
    "t1": "algorithms.t1.workload:WORKLOAD",
}
