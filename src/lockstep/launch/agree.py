"""Before any folder is made: the processes of one run agree on its id, and that they run the same thing."""

from collections.abc import Mapping

from lockstep.distributed.cluster import Cluster
from lockstep.distributed.launchers import agent_run_id, outside_run_id
from lockstep.launch.plan import resolved
from lockstep.runs.config import Config
from lockstep.runs.errors import UserError
from lockstep.runs.folder import new_run_id
from lockstep.runs.provenance import fingerprint


def named_run(config: Config, environ: Mapping[str, str]) -> str | None:
    """The id that the user or whatever started this process gives the run."""
    return config.get("run_id") or outside_run_id(environ)


def agree_on_run(config: Config, cluster: Cluster, accelerator: str, environ: Mapping[str, str]) -> str | None:
    """The run id of all processes; None where this one is alone and nothing names the run.

    Raises:
        UserError: resume=auto where nothing names the run; nodes or ranks that differ, or never came.
    """
    named, resume = named_run(config, environ), config.get("resume")
    if resume == "auto" and not named:
        raise UserError("resume=auto needs to know which run: give run_id=… (or RUN_ID), or resume=<run_id>.")
    if cluster.is_supervisor and cluster.num_nodes > 1:
        met = meet(config, cluster, accelerator, named if resume in (None, "auto") else resume)
        return met if resume in (None, "auto") else named
    if not cluster.is_supervisor and cluster.world_size > 1 and not (named or resume):
        from lockstep.distributed.process_group import agreed_run_id

        return agreed_run_id(cluster, agent_run_id(environ), config["trainer"]["timeout_s"])
    return named


def meet(config: Config, cluster: Cluster, accelerator: str, run_id: str | None) -> str:
    """The supervisors of all nodes agree on the run id, on code and options."""
    from lockstep.distributed.rendezvous import agree

    if cluster.node_rank == 0 and run_id is None:
        run_id = new_run_id()
    mine = fingerprint(resolved(config, cluster, accelerator))
    answer = agree(cluster, mine, run_id, config["trainer"]["timeout_s"])
    return str(answer.run_id)
