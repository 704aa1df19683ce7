"""Contracts that every role, environment and workload must keep, for a user's own tests.

A check raises ``ContractBroken``, whose message names the law, what was found and the likely cause.

Example::

    def test_my_sampler_keeps_the_contract_of_roles():
        check_role(Sampler, RECIPE, [(Sampler.play, (Job(None, seed=1), weights))])
"""

from __future__ import annotations

from heliostat.testing.environments import check_environment
from heliostat.testing.law import ContractBroken
from heliostat.testing.roles import check_role
from heliostat.testing.workloads import check_workload

__all__ = ["ContractBroken", "check_environment", "check_role", "check_workload"]
