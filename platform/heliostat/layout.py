"""Layouts: where a run's processes live and what they may use, known to no method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Literal, Self

from annotated_types import Ge, Le

from heliostat.errors import UsageError, nearest

Family = Literal["data", "environment", "evaluation"]
"""The three families of shared actors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """The actors of one role family: ``members`` logical copies carried by ``hosts`` actors."""

    hosts: Annotated[int, Ge(0)] = 0
    """Ray actors; 0 keeps the members inside the learner's process."""
    members: Annotated[int, Ge(1)] = 1
    """Logical members, at least one a host; host h carries those with m * hosts // members == h."""
    cpus: Annotated[float, Ge(0)] = 1.0
    """CPUs reserved by each host; 0 shares whatever is idle."""
    gpus: Annotated[float, Ge(0)] = 0.0
    """GPUs reserved by each host."""

    @property
    def num_members(self) -> int:
        """Logical members in all."""
        return max(self.members, self.hosts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a submitted run may cost before its supervisor gives up."""

    max_restarts: Annotated[int, Ge(0)] = 3
    """Further attempts after one that died, started late or got stuck; faults get none."""
    first_pause_s: Annotated[float, Ge(0)] = 5.0
    """Pause before the second attempt, in seconds; it doubles with each."""
    longest_pause_s: Annotated[float, Ge(0)] = 300.0
    """Longest pause between attempts."""
    start_deadline_s: Annotated[float, Ge(1)] = 900.0
    """Longest time from an attempt's start until its learner begins."""
    progress_deadline_s: Annotated[float, Ge(1)] = 3600.0
    """Longest time between two rows of metrics."""
    stop_s: Annotated[float, Ge(1)] = 60.0
    """Time to save after a stop was asked for; then the run is ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where a run's processes live. It knows no method."""

    learners: Annotated[int, Ge(0)] = 0
    """Learner ranks under Ray Train; 0 runs the learner in the launching process."""
    min_learners: Annotated[int, Ge(1)] | None = None
    """Set to let Ray Train go on with fewer ranks while nodes are missing (elastic)."""
    resize_every_s: Annotated[float, Ge(1)] = 60.0
    """How often an elastic run looks for nodes that came back, in seconds."""
    learner_cpus: Annotated[float, Ge(0)] = 1.0
    """CPUs reserved by each rank; also its number of torch threads."""
    learner_gpus: Annotated[float, Ge(0)] = 0.0
    """GPUs reserved by each rank."""
    parallelism: Literal["ddp", "fsdp", "deepspeed"] = "ddp"
    """How several ranks share one model."""
    zero_stage: Annotated[int, Ge(1), Le(3)] = 2
    """What deepspeed shards: 1 the optimiser's state, 2 gradients too, 3 weights too."""
    activation_checkpointing: bool = False
    """Compute each block again in the backward pass instead of keeping what is inside it."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of the learner's matrix products; weights stay float32."""
    data: Hosts = Hosts()
    environment: Hosts = Hosts()
    evaluation: Hosts = Hosts()
    start_deadline_s: Annotated[float, Ge(1)] = 180.0
    """Longest wait for actors and learners to start, in seconds."""
    call_deadline_s: Annotated[float, Ge(1)] = 900.0
    """Longest wait for one call on a pool, in seconds."""
    max_restarts: Annotated[int, Ge(0)] = 3
    """Deaths that are made good before a run fails: of learners together, and of each host."""
    job: Job = Job()
    """Limits of a submitted run."""

    def __post_init__(self) -> None:
        """Refuses an elastic minimum above the wanted number of learners."""
        if self.min_learners is not None and self.min_learners > self.learners:
            raise UsageError(
                f"layout.min_learners: expected at most layout.learners={self.learners}, "
                f"found {self.min_learners}; lower it or ask for more learners"
            )

    def check(self) -> None:
        """Refuses a layout whose libraries are missing.

        Raises:
            UsageError: names the library and the alternative.
        """
        if self.parallelism == "deepspeed" and find_spec("deepspeed") is None:
            raise UsageError(
                "layout.parallelism: deepspeed needs its library, found none; "
                "pip install 'heliostat[deepspeed]', or take fsdp"
            )

    @property
    def uses_ray(self) -> bool:
        """Whether any part of the layout needs a Ray cluster."""
        return self.learners > 0 or any(hosts.hosts for _, hosts in self.families())

    def families(self) -> Iterable[tuple[str, Hosts]]:
        """Yields each role family with its actors."""
        yield "data", self.data
        yield "environment", self.environment
        yield "evaluation", self.evaluation

    def hosts_of(self, family: str) -> Hosts:
        """Returns the actors of a role family.

        Raises:
            UsageError: there is no such family; the message gives the nearest.
        """
        families = dict(self.families())
        if family not in families:
            raise UsageError(nearest(family, list(families), "role family"))
        return families[family]

    @classmethod
    def in_process(cls) -> Self:
        """Everything in one process, no Ray: for tests and debuggers."""
        return cls()

    @classmethod
    def laptop(cls) -> Self:
        """One learner and one environment host on two cores; data and evaluation use idle time."""
        return cls(
            learners=1,
            data=Hosts(hosts=1, cpus=0),
            environment=Hosts(hosts=1),
            evaluation=Hosts(hosts=1, cpus=0),
        )

    @classmethod
    def one_gpu(cls) -> Self:
        """Learner and environments share one GPU; data and evaluation stay on CPUs."""
        return cls(
            learners=1,
            learner_gpus=0.5,
            precision="bfloat16",
            data=Hosts(hosts=1),
            environment=Hosts(hosts=1, gpus=0.4),
            evaluation=Hosts(hosts=1, gpus=0.1),
        )

    @classmethod
    def cluster(cls) -> Self:
        """Eight sharded learners and eight environment hosts, one GPU each."""
        return cls(
            learners=8,
            min_learners=4,
            learner_cpus=4,
            learner_gpus=1,
            parallelism="fsdp",
            precision="bfloat16",
            data=Hosts(hosts=2),
            environment=Hosts(hosts=8, members=8, cpus=4, gpus=1),
            evaluation=Hosts(hosts=2, members=2, cpus=2, gpus=1),
        )


@dataclass(frozen=True, slots=True)
class Demand:
    """Equal processes that a layout asks a cluster for."""

    what: str
    count: int
    cpus: float
    """CPUs of each."""
    gpus: float
    """GPUs of each."""


def demands(layout: Layout, pools: Mapping[str, Hosts]) -> list[Demand]:
    """Returns what a layout asks a cluster for; an elastic layout asks for its least.

    Args:
        layout: gives the learners.
        pools: pool name -> its host actors; a pool without any asks for nothing.
    """
    found: list[Demand] = []
    if layout.learners:
        count = layout.min_learners or layout.learners
        found.append(Demand("learners", count, layout.learner_cpus, layout.learner_gpus))
    for name, hosts in pools.items():
        if hosts.hosts:
            found.append(Demand(f"{name} hosts", hosts.hosts, hosts.cpus, hosts.gpus))
    return found
