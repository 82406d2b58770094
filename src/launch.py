"""Composed config → run folder, record and Cluster → this node's supervisor, or training in this process.

Imports no torch: a supervisor, and every error that can be found before work starts, come without it.
"""

import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cluster as world
import provenance
from checkpoint_files import newest_whole, read_sidecar
from cluster import Cluster
from compose import REPOSITORY, plain
from errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USER_ERROR, Diverged, Interrupted, UserError
from readiness import findings
from run_files import (
    SCHEMA_VERSION,
    RunFolder,
    checked_run_id,
    find_run,
    new_run_id,
    read_record,
    utc_now,
    write_atomically,
    write_record,
)
from supervisor import Supervisor, complete_record, die_with_parent

Work = Callable[[dict[str, Any], Cluster, RunFolder], int]


def launch(cfg: Any, work: Work) -> int:
    """Run `work(config, cluster, folder)` in every rank that the config and the environment ask for.

    Returns:
        The exit code.
    """
    config = plain(cfg)
    config["choices"], config["overrides"] = chosen_options(cfg), list(cfg.hydra.overrides.task)
    return launch_config(config, work)


def chosen_options(cfg: Any) -> dict[str, Any]:
    """The option of each config group."""
    return {key: value for key, value in cfg.hydra.runtime.choices.items() if not key.startswith("hydra")}


def launch_config(config: dict[str, Any], work: Work) -> int:
    """The same from a plain config that also holds `choices` (option by group) and `overrides`."""
    environment = world.environment()
    cluster = resolve_cluster(config, environment)
    largest = largest_batch(config, cluster, environment)
    describe_batch(config, cluster)
    _fetch_checkpoint(config)
    if cluster.num_nodes > 1 or cluster.launcher == "torchrun":
        _stop_at_once_on_signal()
    if cluster.world_size > 1 and cluster.local_rank in (0, None):
        for sentence in findings(cluster, environment, Path(config["paths"]["log_dir"])):
            print(f"MEND  {sentence}", flush=True)
    try:
        agree_on_run(config, cluster, environment)
    except Interrupted as error:
        print(f"Interrupted ({error}) before the run began.", flush=True)
        return EXIT_INTERRUPTED
    finally:
        _signals_end_this_process()
    folder, fresh = run_folder(config, cluster, environment)
    if cluster.is_rank_zero or cluster.local_rank in (0, None):
        begin(config, cluster, folder, fresh)
    if cluster.is_rank_zero:
        if largest:
            write_record(folder.record, {**read_record(folder.record), "largest_batch": largest})
        print(headline(config, cluster, folder.run_id), flush=True)
    if cluster.is_supervisor:
        command = [sys.executable, str(Path(sys.argv[0]).resolve())]
        code = Supervisor(cluster, folder, command, environment, timeout_s=config["trainer"]["timeout_s"]).run()
    else:
        code = in_this_process(config, cluster, folder, work)
        _signals_end_this_process()
    _remove_empty_stacks(folder)
    if cluster.is_supervisor or cluster.local_rank == 0:
        code = _finish_upload(config, folder, code, cluster)
    if cluster.is_rank_zero:
        conclude(config, folder, code)
    if cluster.launcher == "torchrun" and code == EXIT_INTERRUPTED:
        return EXIT_OK  # torchrun would start the ranks again, which somebody has just asked to stop
    return code


def _remove_empty_stacks(folder: RunFolder) -> None:
    for path in folder.path.glob("stack-rank*.txt"):
        try:
            if path.stat().st_size == 0:
                path.unlink()
        except FileNotFoundError:  # another rank that shares this folder (SLURM, one disk) was first
            continue


def largest_batch(config: dict[str, Any], cluster: Cluster, environment: dict[str, str]) -> dict[str, Any] | None:
    """For data.global_batch_size=max: find it, put the number into config; what was found, for the record.

    A run that goes on keeps the size that it was started with.
    """
    if config["data"].get("global_batch_size") != "max":
        return None
    if cluster.launcher in ("torchrun", "slurm"):
        raise UserError(
            "data.global_batch_size=max starts ranks of its own, and here "
            f"{cluster.launcher} has started them: run src/find_batch_size.py first and give the number."
        )
    named = config.get("resume") if config.get("resume") != "auto" else config.get("run_id")
    before = RunFolder(_runs(config, Path(config["paths"]["log_dir"])) / checked_run_id(named)) if named else None
    if before and before.config.exists():
        import yaml

        config["data"]["global_batch_size"] = yaml.safe_load(before.config.read_text())["data"]["global_batch_size"]
        return None
    from batch_sessions import find_largest

    if cluster.is_rank_zero:
        print("Looking for the largest batch …", flush=True)
    found = find_largest(config, cluster, environment).record()
    config["data"]["global_batch_size"] = found["global"]
    return found


def _fetch_checkpoint(config: dict[str, Any]) -> None:
    """Check the bucket's settings before anything is written; make ckpt_path=s3://… a file of this machine."""
    s3 = config.get("s3") or {}
    if s3.get("uri"):
        from s3_client import options_from

        options_from(s3)
    if str(config.get("ckpt_path") or "").startswith("s3:"):
        from storage import resolve_checkpoint

        cache = Path(config["paths"]["log_dir"]) / "cache"
        config["ckpt_path"] = str(resolve_checkpoint(config["ckpt_path"], s3, cache).resolve())


def _finish_upload(config: dict[str, Any], folder: RunFolder, code: int, cluster: Cluster) -> int:
    if not (config.get("s3") or {}).get("uri"):
        return code
    from upload_left import finish_upload

    return finish_upload(config["s3"], folder, code, has_rank_zero=cluster.is_rank_zero)


def agree_on_run(config: dict[str, Any], cluster: Cluster, environment: dict[str, str]) -> None:
    """One run id for all processes before any folder is made: config["run_id"], where nothing outside names the run.

    Raises:
        UserError: resume=auto where nothing names the run.
    """
    named = config.get("run_id") or world.outside_run_id(environment)
    if config.get("resume") == "auto" and not named:
        raise UserError("resume=auto needs to know which run: give run_id=… (or RUN_ID), or resume=<run_id>.")
    if cluster.is_supervisor and cluster.num_nodes > 1:
        meet(config, cluster, named if config.get("resume") in (None, "auto") else config["resume"])
    elif cluster.launcher == "torchrun" and cluster.world_size > 1 and not (named or config.get("resume")):
        from join import agreed_run_id

        mine = world.agent_run_id(environment)
        config["run_id"] = agreed_run_id(cluster, mine, config["trainer"]["timeout_s"])


def meet(config: dict[str, Any], cluster: Cluster, run_id: str | None) -> None:
    """The supervisors of all nodes agree on the run id, which goes into config, and on code and options."""
    from rendezvous import agree

    if cluster.node_rank == 0 and run_id is None:
        run_id = new_run_id()
    mine = {
        "run_id": run_id, "host": socket.gethostname(), "tree_hash": provenance.tree_hash(REPOSITORY),
        "config_hash": config_hash(config), "versions": provenance.versions(),
    }  # fmt: skip
    answer = agree(cluster, mine, config["trainer"]["timeout_s"], lambda text: print(text, flush=True))
    if config.get("resume") in (None, "auto"):
        config["run_id"] = answer["run_id"]


RANK_OWN_KEYS = ("paths", "run_id", "resume", "ckpt_path", "resume_step", "overrides", "sweep_dir")


def config_hash(config: dict[str, Any]) -> str:
    """Equal where the options are, whatever folders a node has."""
    import hashlib

    text = json.dumps({k: v for k, v in config.items() if k not in RANK_OWN_KEYS}, sort_keys=True, default=str)
    for folder in config["paths"].values():
        text = text.replace(str(folder), "")
    return hashlib.sha256(text.encode()).hexdigest()


def resume_in_rank(config_path: str, work: Work) -> int:
    """What a rank does that our supervisor started: everything is decided already."""
    environment = world.environment()
    die_with_parent(int(environment["LOCKSTEP_SUPERVISOR"]))
    import yaml

    config = yaml.safe_load(Path(config_path).read_text())
    cluster = world.describe(environment, devices=None, num_nodes=None, several_processes=True, machine=1)
    return in_this_process(config, cluster, RunFolder(Path(config_path).parent), work)


def resolve_cluster(config: dict[str, Any], environment: dict[str, str]) -> Cluster:
    """The Cluster, with `trainer.accelerator`, `devices` and `num_nodes` in config made plain numbers.

    Raises:
        UserError: a GPU is asked for where there is none, with the option that works here.
    """
    trainer = config["trainer"]
    name = config.get("choices", {}).get("trainer", "this trainer")
    gpus = world.visible_gpus(environment)
    if trainer.get("stage_devices"):
        trainer["accelerator"] = "cpu" if str(trainer["stage_devices"][0]).startswith("cpu") else "gpu"
    if trainer["accelerator"] == "auto":
        trainer["accelerator"] = "gpu" if gpus else "cpu"
    stated = None if trainer["devices"] == "auto" else trainer["devices"]
    if stated is not None and (not isinstance(stated, int) or stated < 1):
        raise UserError(f"trainer.devices={stated!r}: give a number from 1 on, or auto.")
    if trainer["accelerator"] == "gpu":
        needed = (trainer["num_gpus"] or 2) if "num_gpus" in trainer else stated or 1  # dp: several in one process
        if gpus < needed:
            simulated = {"ddp": "ddp_sim", "fsdp": "fsdp_sim", "allreduce": "allreduce_sim", "dp": "ddp_sim"}
            has = "no GPU" if gpus == 0 else f"{gpus} GPU{'s' if gpus > 1 else ''}"
            raise UserError(
                f"trainer={name} asks for {needed} GPU{'s' if needed > 1 else ''} and this machine has {has}: "
                f"trainer={simulated.get(name, 'cpu')} works here."
            )
    cluster = world.describe(
        environment,
        devices=stated,
        num_nodes=None if trainer["num_nodes"] == "auto" else trainer["num_nodes"],
        several_processes=trainer["launch"] == "process_per_device",
        machine=gpus if trainer["accelerator"] == "gpu" else 1,
    )
    if trainer["launch"] == "process_per_device":
        trainer["devices"] = cluster.devices
    trainer["num_nodes"] = cluster.num_nodes
    return cluster


def describe_batch(config: dict[str, Any], cluster: Cluster) -> None:
    """Write `per_device_batch_size` into config; an error names the nearest global batches that divide."""
    size = config["data"].get("global_batch_size")
    parts = config["trainer"]["accumulate_grad_batches"] * cluster.world_size
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise UserError(f"data.global_batch_size={size!r}: give a whole number from 1 on.")
    if config["trainer"]["accumulate_grad_batches"] < 1:
        raise UserError("trainer.accumulate_grad_batches counts from 1 on.")
    if size % parts:
        below, above = size // parts * parts, (size // parts + 1) * parts
        near = f"{below} and {above}" if below else str(above)
        raise UserError(
            f"data.global_batch_size={size} does not divide into {cluster.world_size} ranks × "
            f"{config['trainer']['accumulate_grad_batches']} accumulated batches: the nearest that do are {near}."
        )
    config["per_device_batch_size"] = size // parts


def headline(config: dict[str, Any], cluster: Cluster, run_id: str) -> str:
    accumulate = config["trainer"]["accumulate_grad_batches"]
    return (
        f"run {run_id} · {config['model']['name']} · {config['data']['name']} · {config['choices']['trainer']} · "
        f"global batch {config['data']['global_batch_size']} = {config['per_device_batch_size']} × "
        f"{cluster.world_size} × {accumulate}"
    )


def run_folder(config: dict[str, Any], cluster: Cluster, environment: dict[str, str]) -> tuple[RunFolder, bool]:
    """The folder of this run, not yet made, and whether the run is new.

    Raises:
        UserError: the run to resume is unknown or finished, or a new run would overwrite one.
    """
    logs = Path(config["paths"]["log_dir"])
    resume = config.get("resume")
    named = config.get("run_id") or world.outside_run_id(environment)
    if resume == "auto":
        folder = RunFolder(_runs(config, logs) / checked_run_id(named or ""))
        if (config.get("s3") or {}).get("uri") and cluster.local_rank in (0, None):
            from s3_client import options_from
            from storage import fetch_run

            fetch_run(options_from(config["s3"]), folder)
        return folder, not folder.record.exists()
    if resume and cluster.node_rank == 0:
        return find_run(logs, resume), False
    if resume:  # this node may never have had the folder
        return RunFolder(_runs(config, logs) / checked_run_id(resume)), True
    folder = RunFolder(_runs(config, logs) / checked_run_id(named or new_run_id()))
    makes_it = cluster.local_rank in (0, None)
    if makes_it and folder.record.exists():
        if _restarted_from_outside(folder, environment):
            return folder, False
        raise UserError(
            f"The run {folder.run_id} exists already: resume={folder.run_id} goes on with it, "
            "another run_id= starts anew."
        )
    return folder, True


def _runs(config: dict[str, Any], logs: Path) -> Path:
    return Path(config["sweep_dir"]) if config.get("sweep_dir") else logs / config["task_name"] / "runs"


def _restarted_from_outside(folder: RunFolder, environment: dict[str, str]) -> bool:
    """torchrun's agent started its ranks again, or SLURM requeued the job: the same run goes on by itself."""
    agent = world.agent_id(environment)
    return agent is not None and read_record(folder.record).get("agent") == agent


def begin(config: dict[str, Any], cluster: Cluster, folder: RunFolder, fresh: bool) -> None:
    """Make the folder, config.yaml and the first record; for a resumed run check that it is the same one."""
    import yaml

    previous = None if fresh else read_record(folder.record)
    if previous is not None:
        _check_resumable(config, folder, previous)
    if previous is not None or config.get("resume") == "auto":
        checkpoint = newest_whole(folder.checkpoints)
        config["ckpt_path"] = str(checkpoint) if checkpoint else None
        config["resume_step"] = (read_sidecar(checkpoint) or {}).get("step") if checkpoint else 0
        if previous is not None or checkpoint:
            place = checkpoint.name if checkpoint else "its start: no whole checkpoint"
            print(f"Resuming {folder.run_id} from {place}.")
    if cluster.world_size > 1 and config.get("ckpt_path") and cluster.node_rank == 0:
        config["ckpt_path"] = str(Path(config["ckpt_path"]).resolve())
    folder.path.mkdir(parents=True, exist_ok=True)
    if config["task_name"] == "train":
        from compose import compose

        untouched = compose("train", [])
        defaults = {**plain(untouched), "choices": chosen_options(untouched)}
        write_atomically(folder.defaults, lambda file: yaml.safe_dump(defaults, file, sort_keys=False))
    write_atomically(folder.config, lambda file: yaml.safe_dump(config, file, sort_keys=False))
    if cluster.node_rank > 0:
        return
    record = first_record(config, cluster, folder)
    if previous is not None:
        record = continued(previous, record, config)
    else:
        diff = provenance.code_diff(REPOSITORY) if record["code"]["dirty"] else ""
        if diff:
            write_atomically(folder.code_diff, lambda file: file.write(diff))
    write_record(folder.record, record)


IGNORED_ON_RESUME = (
    "resume", "run_id", "ckpt_path", "overrides", "choices", "resume_step", "per_device_batch_size", "trainer", "paths",
    "tags", "test", "s3", "hardware", "callbacks", "logger", "debug", "optimized_metric", "sweep_dir", "task_name",
)  # fmt: skip


def _check_resumable(config: dict[str, Any], folder: RunFolder, previous: dict[str, Any]) -> None:
    import yaml

    if previous.get("status") == "finished" and config["trainer"]["max_epochs"] <= previous.get("epochs", 0):
        raise UserError(
            f"The run {folder.run_id} is finished ({previous.get('epochs')} epochs): "
            "give more trainer.max_epochs to go on."
        )
    before, now = (_without_places(tree) for tree in (yaml.safe_load(folder.config.read_text()), config))
    for key in sorted(before.keys() | now.keys()):
        if key not in IGNORED_ON_RESUME and before.get(key) != now.get(key):
            differs = _difference(before.get(key), now.get(key))
            raise UserError(
                f"The run {folder.run_id} was started with another {key} ({differs}): "
                "resume it with the same options, or start a new run with ckpt_path=."
            )


def _without_places(config: dict[str, Any]) -> dict[str, Any]:
    """Where the data lies may differ from machine to machine; what it is, data_hash tells."""
    data = {key: value for key, value in config.get("data", {}).items() if key not in ("root", "cache_dir")}
    return {**config, "data": data}


def _difference(before: Any, now: Any, path: str = "") -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                return _difference(before.get(key), now.get(key), f"{path}.{key}")
    return f"{path.lstrip('.')} was {before!r}, now {now!r}"


def first_record(config: dict[str, Any], cluster: Cluster, folder: RunFolder) -> dict[str, Any]:
    """The record before anything has happened."""
    now = utc_now()
    choices, trainer = config["choices"], config["trainer"]
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": folder.run_id,
        "task_name": config["task_name"],
        "tags": list(config["tags"]),
        "status": "running",
        "phase": "start",
        "error": None,
        "exit_code": None,
        "started_at": now,
        "updated_at": now,
        "finished_at": None,
        "command": shlex.join(["python", _as_typed(sys.argv[0]), *sys.argv[1:]]),
        "overrides": config["overrides"],
        "experiment": config.get("experiment_name") or choices.get("experiment"),
        "code": provenance.code_state(REPOSITORY),
        "versions": provenance.versions(),
        "hosts": [provenance.host(cluster.node_rank)],
        "launcher": cluster.launcher,
        "agent": world.agent_id(world.environment()),
        "model": config["model"]["name"],
        "data": config["data"]["name"],
        "trainer": choices["trainer"],
        "world_size": cluster.world_size,
        "num_nodes": cluster.num_nodes,
        "devices": trainer["devices"],
        "accelerator": trainer["accelerator"],
        "precision": trainer["precision"],
        "seed": config["seed"],
        "global_batch_size": config["data"]["global_batch_size"],
        "per_device_batch_size": config["per_device_batch_size"],
        "accumulate_grad_batches": trainer["accumulate_grad_batches"],
        "max_epochs": trainer["max_epochs"],
        "epochs": 0,
        "steps": 0,
        "num_parameters": None,
        "metrics": {},
        "fit_seconds": None,
        "images_per_s": None,
        "best_checkpoint": None,
        "resumed_from": config.get("ckpt_path"),
        "restarts": [],
    }


def _as_typed(program: str) -> str:
    path = Path(program).resolve()
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else path.name


def continued(previous: dict[str, Any], record: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """One record for one run across its restarts: the beginning and what was reached stay."""
    kept = ("started_at", "metrics", "fit_seconds", "best_checkpoint", "restarts", "command", "code", "steps", "epochs")
    step = config.get("resume_step") or 0
    restart = {
        "at": record["started_at"],
        "resumed_step": step,
        "lost_steps": max(0, (previous.get("steps") or 0) - step),
        "downtime_s": _seconds(previous.get("updated_at"), record["started_at"]),
        "command": record["command"],
        "previous_status": previous.get("status"),
    }
    record = {**record, **{key: previous[key] for key in kept if previous.get(key) is not None}}
    record["restarts"] = [*record["restarts"], restart]
    record["resumed_from"] = config.get("ckpt_path")
    return record


def take_over_record(folder: RunFolder, previous: dict[str, Any] | None, config: dict[str, Any]) -> None:
    """On node 0, where the run's earlier record and newest checkpoint were found on another node."""
    if previous is not None:
        write_record(folder.record, continued(previous, read_record(folder.record), config))


def _seconds(earlier: str | None, later: str) -> float | None:
    from run_files import seconds_between

    return seconds_between(earlier, later) if earlier else None


def in_this_process(config: dict[str, Any], cluster: Cluster, folder: RunFolder, work: Work) -> int:
    """Call work and turn how it ends into an exit code, a record, and one error file a rank."""
    world.adopt(cluster)
    _dump_stack_on_signal(folder, cluster)
    _stop_at_once_on_signal()
    try:
        try:
            return work(config, cluster, folder)
        finally:
            _ignore_signals()  # what is left is short, and a supervisor may ask again
    except Interrupted as error:
        _end(folder, cluster, "interrupted", EXIT_INTERRUPTED, None)
        if cluster.is_rank_zero:
            print(f"Interrupted ({error}): resume={folder.run_id} goes on.", flush=True)
        return EXIT_INTERRUPTED
    except UserError as error:
        return _failed(folder, cluster, error, EXIT_USER_ERROR)
    except Diverged as error:
        return _failed(folder, cluster, error, EXIT_FAILED)
    except KeyboardInterrupt:
        _end(folder, cluster, "interrupted", EXIT_INTERRUPTED, None)
        return EXIT_INTERRUPTED
    except Exception as error:
        import traceback

        traceback.print_exc()
        return _failed(folder, cluster, error, EXIT_FAILED)


def _stop_at_once_on_signal() -> None:
    """Before there is anything to save, a signal just ends the run; Interruption takes over in training."""
    import signal

    def stop(number: int, _frame: Any) -> None:
        raise Interrupted(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, stop)


def _ignore_signals() -> None:
    import signal

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _signals_end_this_process() -> None:
    """As in any program."""
    import signal

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _failed(folder: RunFolder, cluster: Cluster, error: Exception, code: int) -> int:
    message = str(error) if isinstance(error, UserError | Diverged) else f"{type(error).__name__}: {error}"
    phase = read_record(folder.record).get("phase", "start") if folder.record.exists() else "start"
    facts = {
        "rank": cluster.rank, "host": socket.gethostname(), "phase": phase, "message": message,
        "kind": type(error).__name__, "time": time.time(),
    }  # fmt: skip
    report_failure(getattr(error, "culprit", None) or facts, folder, cluster, code)
    return code


def report_failure(facts: dict[str, Any] | None, folder: RunFolder, cluster: Cluster, code: int = EXIT_FAILED) -> None:
    """What the run knows of how it ended (None: it was stopped): this rank's error file, the screen and the record.

    A supervisor reads the error files and does the rest itself.
    """
    if facts is None:
        return _end(folder, cluster, "interrupted", EXIT_INTERRUPTED, None)
    write_atomically(folder.rank_error(cluster.rank), lambda file: file.write(json.dumps(facts)))
    if cluster.launcher != "supervisor":
        if cluster.is_rank_zero and code != EXIT_USER_ERROR:
            complete_record(folder, facts, code)
        if code == EXIT_USER_ERROR and cluster.is_rank_zero:
            _end(folder, cluster, "failed", code, facts)
        where = "" if code == EXIT_USER_ERROR else f"rank {facts['rank']} on {facts['host']}, in {facts['phase']}: "
        print(f"error: {where}{facts['message']}", file=sys.stderr, flush=True)


def _end(folder: RunFolder, cluster: Cluster, status: str, code: int, error: dict[str, Any] | None) -> None:
    if cluster.is_rank_zero:
        record = read_record(folder.record)
        named = {key: error[key] for key in ("message", "rank", "host", "phase")} if error else None
        record.update(status=status, exit_code=code, finished_at=utc_now(), error=named)
        write_record(folder.record, record)


def _dump_stack_on_signal(folder: RunFolder, cluster: Cluster) -> None:
    """SIGUSR2 from the supervisor: this rank's Python stacks go to the run folder."""
    import faulthandler
    import signal

    if folder.path.is_dir():
        folder.stack(cluster.rank).unlink(missing_ok=True)
        file = folder.stack(cluster.rank).open("a")  # the watch may write there too
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def conclude(config: dict[str, Any], folder: RunFolder, code: int) -> None:
    """The last line of a run, and its page in the logbook; nothing here changes the exit code."""
    record = read_record(folder.record)
    if code == EXIT_OK and record["status"] == "finished":
        shown = {name: value for name, value in record["metrics"].items() if name in ("val/acc_best", "test/acc")}
        words = " · ".join(f"{name} {value:.2%}" for name, value in shown.items())
        print(f"finished · {words} · {os.path.relpath(folder.path)}", flush=True)
    try:
        from pages.build import record_run

        record_run(folder.path, Path(config["paths"]["logbook_dir"]))
    except Exception as error:  # the pages never change how a run ends
        print(f"The logbook page was not written ({type(error).__name__}: {error}); make logbook tries again.")
    upload = record.get("upload") or {}
    if upload.get("error"):
        print(
            f"The best checkpoint is NOT in the bucket: {upload['error']}; "
            f"python src/upload.py {folder.run_id} sends it.",
            flush=True,
        )
