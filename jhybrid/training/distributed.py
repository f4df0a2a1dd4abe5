"""Joins the processes of a multi-process run, from flags or from the cluster's environment."""

from collections.abc import Mapping

import jax

from jhybrid.errors import UserError


def _several_processes(environ: Mapping[str, str]) -> bool:
    """Whether a launcher that `jax.distributed` recognises started more than one process."""
    counts = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
    hosts = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
    return any(environ.get(name, "1") not in ("", "1") for name in counts) or any(
        "," in environ.get(name, "") for name in hosts
    )


def initialize(
    environ: Mapping[str, str],
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Calls `jax.distributed.initialize` when there is more than one process.

    The three flags go together. Without them, a step of Slurm, Open MPI or a TPU pod slice is
    recognised by its environment variables; anything else is a single process.
    """
    if coordinator is None and num_processes is None and process_id is None:
        if _several_processes(environ):
            jax.distributed.initialize()
    elif coordinator is None or num_processes is None or process_id is None:
        raise UserError("--coordinator, --num-processes and --process-id go together")
    elif not 0 <= process_id < num_processes:
        raise UserError(f"--process-id {process_id} must lie in 0..{num_processes - 1}")
    else:
        jax.distributed.initialize(coordinator, num_processes, process_id)
