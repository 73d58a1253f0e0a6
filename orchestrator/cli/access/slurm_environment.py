"""Compare this shell's Slurm environment with the controller's, because only one of them may work."""

import os
import time

from orchestrator.cli.terminal.render import Screen
from orchestrator.controller.slurm_contact import SlurmContact, read_contact
from orchestrator.errors import Precondition
from orchestrator.home import registry_path
from orchestrator.registry.lease import displayed_state, holder_host
from orchestrator.registry.records import Lease
from orchestrator.scheduler.slurm.client_environment import ClientEnvironment

RESTART = "`orch controller stop`, then run the command again: the next controller uses this shell's environment"

_ELSEWHERE = "in a shell where `sinfo` answers (`export SLURM_CONF=FILE`), type `orch controller start`"


def read_live_contact(lease: Lease | None) -> SlurmContact | None:
    """Return the Slurm contact of the controller with this lease; None if it is not alive or has not reported yet."""
    return read_contact(registry_path(), lease) if displayed_state(lease, time.time()).alive else None


def silence_reason(lease: Lease | None) -> str:
    """Return why a live controller gets no answer from Slurm; empty if Slurm answers."""
    contact = read_live_contact(lease)
    return contact.silence if contact is not None else ""


def unset_words(kind: str) -> str:
    """Return a note that SLURM_CONF is not set in this shell; empty if it is set or irrelevant."""
    from orchestrator.scheduler.available_schedulers import FACTORIES  # `orch status` seldom needs it

    matters = FACTORIES[kind].named_by_environment
    return "; SLURM_CONF is not set" if matters and not os.environ.get("SLURM_CONF") else ""


def warn_of_silence(screen: Screen, kind: str, scheduler: str, here: str) -> bool:
    """Warn if a request is pending because its scheduler does not answer; return whether it is pending.

    `here` is the error from this process's own controller pass; empty if a controller is handling it.
    """
    if here:
        words = f"{kind} does not answer from here ({here}{unset_words(kind)}): the request stands"
        screen.warn("no_answer", f"{words}; {_ELSEWHERE}")
        return True
    from orchestrator.registry import fast_queries
    from orchestrator.scheduler.available_schedulers import make_instance
    from orchestrator.scheduler.scheduler_instance import unknown_instance

    leases = [fast_queries.lease(registry_path(), key) for key in (scheduler, unknown_instance(kind)) if key]
    silence = next(filter(None, map(silence_reason, leases)), "")
    if silence:
        words = f"{kind} does not answer the controller ({silence}): the request stands until it does"
        screen.warn("no_answer", words)
    if silence or any(displayed_state(lease, time.time()).alive for lease in leases):
        return bool(silence)
    reached = make_instance(kind)
    if not reached():  # no pass has queried the scheduler, because it has no live controller
        screen.warn(
            "no_answer", f"{kind} does not answer from here ({reached.silence}): the request stands; {_ELSEWHERE}"
        )
        return True
    return False


def compare_with_controller(screen: Screen, kind: str) -> None:
    """Report differences between the live controller's Slurm environment and this shell's, before a submit.

    Raises Precondition if the controller gets no answer because of a setting that cannot be handed to it.
    """
    from orchestrator.registry import fast_queries
    from orchestrator.scheduler.available_schedulers import FACTORIES, lease_key

    if not FACTORIES[kind].named_by_environment:
        return

    lease = fast_queries.lease(registry_path(), lease_key(kind))
    contact, mine = read_live_contact(lease), ClientEnvironment.from_environ()
    if lease is None or contact is None:
        return
    who = f"the controller (pid {contact.pid} on {holder_host(lease.holder)})"
    differs = contact.client.differences(mine)
    if contact.silence and contact.client.token != mine.token:
        what = f"{who} gets no answer from Slurm: {contact.silence}"
        raise Precondition(what, where=f"its {'; its '.join(differs)}", hint=RESTART)
    if contact.silence and differs:
        screen.note(f"{who} gets no answer from Slurm; it continues with this shell's environment")
    elif contact.client.sbatch != mine.sbatch:
        words = f"{who} submits with {contact.client.sbatch}, not with this shell's {mine.sbatch}; {RESTART}"
        screen.warn("other_sbatch", words)
