"""The assignment "ViT on CIFAR-10 at scale" in one command, typed once on each machine; typed again, it goes on.

    python src/assignment.py --s3 s3://bucket/prefix                                      one machine
    python src/assignment.py --s3 s3://bucket/prefix --nodes 2 --node 0 --master HOST     on each of two
    python src/assignment.py … -- trainer.max_epochs=5 callbacks=spot                     with options of train.py

For DDP and for FSDP: the largest batch, 26 epochs with it, the best checkpoint in the bucket. Then on node 0 the test
of both from the bucket, the comparison page and the report. See docs/assignment.md.
"""

if __name__ == "__main__":  # before anything else is imported: a Ctrl-C counts from here on
    from lockstep.runs.signals import end_on_signal

    end_on_signal()

import argparse
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lockstep.config.compose import CONFIGS
from lockstep.config.declared import key_of
from lockstep.distributed.cluster import environment
from lockstep.distributed.supervisor import die_with_parent
from lockstep.runs.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UserError
from lockstep.runs.files import utc_now, write_atomically
from lockstep.runs.folder import checked_run_id, find_run
from lockstep.runs.foreign_files import read_json
from lockstep.runs.output import set_up
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.record import read_record
from lockstep.runs.script import exit_code_of

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ROUNDED = 0.002  # of the images may be counted otherwise in 16 bits, which each strategy rounds in its own places
OF_PLACES = ("paths", "s3", "data.root", "data.download_dir")  # what the test takes of the training's words


@dataclass(frozen=True)
class Step:
    """One script of this project.

    Args:
        name: in the state file.
        what: said as it begins.
        variables: of its environment, beside those of this process.
    """

    name: str
    what: str
    command: list[str]
    variables: dict[str, str]


Run = Callable[[Step], int]  # its exit code


class Assignment:
    """The steps of this node, in order, and which are done."""

    def __init__(self, options: argparse.Namespace, words: list[str], run: Run) -> None:
        self.options, self.words, self.run = options, words, run
        self.state = options.logs / "assignment" / f"{options.name}-node{options.node}.json"

    def go(self) -> int:
        """Do what is left; the exit code of the first step that did not end well."""
        steps, done = self.steps(), self.done()
        for step in steps:
            if step.name in done and done[step.name]["command"] != step.command:
                raise UserError(
                    f"{step.name} of {self.options.name!r} was done with other options "
                    f"({shlex.join(done[step.name]['command'])}): give the same, or begin anew with another name."
                )
        for number, step in enumerate(steps, 1):
            if step.name in done:
                log.info(f"assignment {number}/{len(steps)}: {step.what}: done at {done[step.name]['at']}")
                continue
            log.info(f"assignment {number}/{len(steps)}: {step.what}\n  {shlex.join(step.command)}")
            code = self.run(step)
            if code == EXIT_OK and step.name.startswith("test "):
                code = self.check_test(step.name.removeprefix("test "))
            if code != EXIT_OK:
                log.info(f"assignment: stopped in “{step.what}” (exit code {code}). {self.again(code)}")
                return code
            done[step.name] = {"command": step.command, "at": utc_now()}
            write_atomically(self.state, lambda file: json.dump(done, file, indent=1))
        log.info(self.last_words())
        return EXIT_OK

    def done(self) -> dict[str, dict]:
        try:
            held = read_json(self.state)
            return {name: {"command": list(step["command"]), "at": str(step["at"])} for name, step in held.items()}
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(
                f"{self.state} cannot be read: remove it, finished runs are found by their names."
            ) from None

    def steps(self) -> list[Step]:
        options = self.options
        steps = [self.training(strategy) for strategy in options.strategies]
        if options.node == 0:
            steps += [self.test(strategy) for strategy in options.strategies]
            runs = [self.run_id(strategy) for strategy in options.strategies]
            title = ["--title", f"{options.name}: {' beside '.join(options.strategies)}"]
            if len(runs) > 1:
                steps.append(self.logbook("compare", "writes the comparison page", *runs, "--keep", *title))
            to = str(options.logbook / "reports")
            steps.append(self.logbook("publish", "writes the report with all curves", *runs, "--to", to, *title))
        return steps

    def training(self, strategy: str) -> Step:
        """On all nodes together. `max` looks for the largest batch first, and the record keeps what it found."""
        options, recipe = self.options, f"vit_{strategy.removesuffix('_sim')}"
        words = [f"experiment={recipe}", f"trainer={strategy}", f"run_id={self.run_id(strategy)}", "resume=auto"]
        words += [*self.places(), "data.global_batch_size=max"]
        variables = {}
        if options.nodes > 1:
            words.append(f"trainer.num_nodes={options.nodes}")
            variables = {"MASTER_ADDR": options.master, "MASTER_PORT": options.port, "NODE_RANK": str(options.node)}
        named = {key_of(word) for word in self.words}
        words = [word for word in words if key_of(word) not in named]
        what = f"{strategy}: looks for the largest batch, trains, uploads the best checkpoint"
        return Step(f"train {strategy}", what, ["src/train.py", *words, *self.words], variables)

    def test(self, strategy: str) -> Step:
        words = [f"ckpt_path={self.options.s3}/{self.run_id(strategy)}"]
        own = [word for word in self.words if any(f"{key_of(word)}.".startswith(f"{place}.") for place in OF_PLACES)]
        return Step(
            f"test {strategy}", f"{strategy}: tests the checkpoint that lies in the bucket",
            ["src/eval.py", *words, *self.places(), *own], {},
        )  # fmt: skip

    def logbook(self, name: str, what: str, *words: str) -> Step:
        options = self.options
        places = ["--logbook", str(options.logbook), "--logs", str(options.logs)]
        return Step(name, what, ["src/logbook.py", *places, name, *words], {})

    def places(self) -> list[str]:
        options = self.options
        endpoint = [f"s3.endpoint_url={options.endpoint_url}"] if options.endpoint_url else []
        paths = [f"paths.log_dir={options.logs}", f"paths.logbook_dir={options.logbook}"]
        return [f"s3.uri={options.s3}", *endpoint, *paths]

    def run_id(self, strategy: str) -> str:
        return f"{self.options.name}-{strategy}"

    def check_test(self, strategy: str) -> int:
        """The counts from the bucket are those of the run's own test; says so on its page."""
        own = read_record(find_run(self.options.logs, self.run_id(strategy)).record)
        address = f"ckpt_path={self.options.s3}/{self.run_id(strategy)}"
        records = map(read_record, (self.options.logs / "eval" / "runs").glob("*/run.json"))
        tested = max((one for one in records if address in one.overrides), key=lambda one: str(one.started_at))
        counts = [
            [float(one.metrics.get(f"test/{name}") or 0) for name in ("correct", "images")] for one in (own, tested)
        ]
        (own_correct, own_images), (correct, images) = counts
        allowed = 0 if str(own.precision)[:2] in ("32", "64") else ROUNDED * own_images
        if not images or images != own_images or abs(correct - own_correct) > allowed:
            log.error(f"{own.run_id} counted {counts[0]} (correct, images), its checkpoint in the bucket {counts[1]}.")
            return EXIT_FAILED
        also = "as the run itself counted"
        if correct != own_correct:
            also = f"the run itself counted {own_correct:,.0f}: each strategy rounds {own.precision} in its own places"
        words = f"Tested again from the bucket by src/eval.py: {correct:,.0f} of {images:,.0f} right, {also}."
        return self.run(self.logbook("note", "", str(own.run_id), words))

    def again(self, code: int) -> str:
        first = "The" if code == EXIT_INTERRUPTED else "Mend what the lines above say: then the"
        where = " on every node" if self.options.nodes > 1 else ""
        return f"{first} same command, typed again{where}, goes on from there."

    def last_words(self) -> str:
        options = self.options
        if options.node:
            return f"assignment: node {options.node} is done; pages are written on node 0."
        return f"assignment: done. The pages are in {options.logbook}: git add them, and push."


def run_script(step: Step) -> int:
    """Run it to its end; a signal goes on to it, and where it ends well all the same, nothing more is begun."""
    asked: list[int] = []
    process = subprocess.Popen(
        [sys.executable, str(REPOSITORY / step.command[0]), *step.command[1:]],
        env={**environment(), **step.variables},
        process_group=0,  # a Ctrl-C of the terminal reaches it once, from here
        preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
    )

    def hand_on(number: int, _frame: object) -> None:
        asked.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in SIGNALS}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code < 0:
        return 128 - code
    return code or (EXIT_INTERRUPTED if asked else EXIT_OK)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="assignment.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--s3", required=True, help="s3://bucket/prefix, where checkpoints, records and curves go")
    top.add_argument("--endpoint-url", help="of a store that speaks S3; none: Amazon's")
    top.add_argument("--nodes", type=int, default=1, help="machines (default: 1)")
    top.add_argument("--node", type=int, default=0, help="which of them this one is, from 0 on")
    top.add_argument("--master", help="node 0's address as the others reach it")
    top.add_argument("--port", default="29500", help="of node 0 (default: 29500)")
    top.add_argument("--name", default="assignment", help="of the runs: assignment-ddp, assignment-fsdp")
    top.add_argument(
        "--strategies", type=lambda text: text.split(","), default=["ddp", "fsdp"], help="ddp_sim,fsdp_sim: on CPUs"
    )
    top.add_argument("--logs", type=Path, default=REPOSITORY / "logs", help="where run folders go")
    top.add_argument("--logbook", type=Path, default=REPOSITORY / "logbook", help="where pages go")
    return top


def check(options: argparse.Namespace) -> None:
    """
    Raises:
        UserError: what cannot be meant.
    """
    checked_run_id(options.name)
    if not options.s3.startswith("s3://"):
        raise UserError(f"--s3 {options.s3!r}: give s3://bucket/prefix (make assignment S3=s3://bucket/prefix).")
    if not 0 <= options.node < options.nodes:
        raise UserError(f"--node {options.node}: of {options.nodes} nodes give 0 to {options.nodes - 1}.")
    if options.nodes > 1 and not options.master:
        raise UserError("Several nodes need node 0's address: --master HOST (make assignment … MASTER=HOST).")
    known = {path.stem for path in (CONFIGS / "trainer").glob("*.yaml")}
    for strategy in options.strategies:
        if strategy not in known or not (CONFIGS / f"experiment/vit_{strategy.removesuffix('_sim')}.yaml").exists():
            raise UserError(f"--strategies {strategy}: there are ddp, fsdp, ddp_sim and fsdp_sim.")


def main(argv: list[str], run: Run = run_script) -> int:
    set_up()
    at = argv.index("--") if "--" in argv else len(argv)
    options, words = parser().parse_args(argv[:at]), argv[at + 1 :]

    def task() -> int:
        check(options)
        options.s3 = options.s3.rstrip("/")
        options.logs, options.logbook = options.logs.resolve(), options.logbook.resolve()
        return Assignment(options, words, run).go()

    return exit_code_of(task)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
