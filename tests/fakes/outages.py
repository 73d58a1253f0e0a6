"""Model Slurm with outages: refusals, boot failures, preemption and removed nodes."""

from dataclasses import dataclass, field
from typing import Any

from orchestrator.errors import Retryable, SubmitRejected
from orchestrator.scheduler.interface import JobSpec
from orchestrator.scheduler.slurm.refusals import submit_error
from tests.fakes.model_slurm import ModelJob, ModelSlurm

_FAILED = "sbatch: error: Batch job submission failed: "
_POLICY = f"{_FAILED}Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
PASSING_REFUSALS = (
    f"sbatch: error: QOSMaxSubmitJobPerUserLimit\n{_POLICY}",
    f"sbatch: error: AssocMaxSubmitJobLimit\n{_POLICY}",
    _POLICY,
    f"{_FAILED}Requested partition configuration not available now",
    f"{_FAILED}System submissions disabled",
    f"{_FAILED}Resource temporarily unavailable",
    f"{_FAILED}the site's own words, which nobody knows",
    f"{_FAILED}Socket timed out on send/recv operation",
    "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
    "sbatch: fatal: Could not establish a configuration source",
)
"""sbatch's messages during temporary problems."""


@dataclass
class Outages:
    """End times of outages in seconds since the epoch; 0: none."""

    refused_until: float = 0.0
    words: str = PASSING_REFUSALS[0]
    boots_fail_until: float = 0.0
    preempted_until: float = 0.0  # every job that runs is preempted after `preempted_after` seconds
    preempted_after: float = 30.0
    decommissioned: set[str] = field(default_factory=set)

    def end(self) -> None:
        """End all outages; removed nodes stay removed."""
        self.refused_until = self.boots_fail_until = self.preempted_until = 0.0


class OutageSlurm(ModelSlurm):
    """The model Slurm, with outages."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.outages = Outages()
        self.silent_until = 0.0  # the end of a silence that has one

    def submit(self, spec: JobSpec) -> str | None:
        if self.clock.now < self.outages.refused_until:
            self.calls.append(f"refuse {spec.name}")
            raise submit_error(self.outages.words)
        gone = self.outages.decommissioned & set(spec.resources.exclude)
        if gone:
            ours = tuple(sorted(gone & set(spec.resources.avoided)))
            retryable = Retryable.YES if ours else Retryable.NEVER
            raise SubmitRejected(f"{_FAILED}Invalid node name specified", retryable=retryable, unknown_nodes=ours)
        return super().submit(spec)

    def decommission(self, node: str) -> None:
        """Remove a node from slurm.conf; jobs that name it are refused."""
        self.nodes.remove(node)
        self.outages.decommissioned.add(node)

    def step(self, seconds: float) -> None:
        super().step(seconds)
        if self.clock.now < self.outages.preempted_until:
            for job in self.running():
                if job.started is not None and self.clock.now - job.started >= self.outages.preempted_after:
                    self.preempt(job)

    def _start(self, job: ModelJob) -> None:
        if self.clock.now >= self.outages.boots_fail_until:
            super()._start(job)
            return
        job.state, job.started, job.ended = "BOOT_FAIL", self.clock.now, self.clock.now
        job.accounted_at = self.clock.now + self.slurm_faults.accounting_lag
