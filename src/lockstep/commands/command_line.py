"""Run a script from the command line: parse Hydra's options, compose the config, hand it to the script's task."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.config import schema
from lockstep.config.compose import CONFIGS, compose, quoted, register_resolvers, unresolved, without_hydra
from lockstep.process.errors import UserError
from lockstep.process.output import say, set_up
from lockstep.process.script import exit_code_of
from lockstep.records.config import Config


def _parse(config_name: str, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return Hydra's options and the overrides, in any order; --config-dir becomes an override."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for name, short in (("help", "h"), ("multirun", "m"), ("resolve", "R"), ("shell-completion", "sc")):
        parser.add_argument(f"--{name}", f"-{short}", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--info", "-i", nargs="?", const="all")
    options, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:  # an option of another program, as --epochs
        name, _, value = unknown[0].partition("=")
        if name in ("--config-name", "-cn", "--config-path", "-cp"):
            raise UserError(f"{name}: choose a recipe as experiment=NAME; --config-dir adds a folder of yamls.")
        key = name.lstrip("-").replace("-", "_")
        found = schema.nearest(key, list(schema.dotted(unresolved(compose(config_name, []))))) or key
        raise UserError(f"{unknown[0]}: keys are written without dashes: {found.rstrip('=')}={value or 'VALUE'}.")
    overrides = list(options.overrides)
    if options.config_dir:
        folder = Path(options.config_dir).expanduser().resolve()
        if not folder.is_dir():
            raise UserError(f"--config-dir {options.config_dir} is not a folder.")
        overrides.append(f"hydra.searchpath=[{quoted(f'file://{folder}')}]")
    return options, overrides


def run_script(
    config_name: str, argv: list[str], task: Callable[[Any], int], description: str,
    find_stored: Callable[[list[str]], Config | None] = lambda overrides: None,
) -> int:  # fmt: skip
    """Compose the config of the command line and hand it to `task`; return the exit code.

    Args:
        find_stored: returns the config of the run that the overrides name, as by resume=.
    """
    set_up()

    def run() -> int:
        if "snapshot=true" in map(str.lower, argv):
            from lockstep.commands.snapshot import run_from_snapshot

            run_from_snapshot(argv)
        options, overrides = _parse(config_name, argv)
        if options.help:
            say(schema.help_text(CONFIGS, config_name, description))
        elif options.multirun:
            from lockstep.sweeps.jobs import run_sweep

            return run_sweep(config_name, overrides)
        elif options.info or options.shell_completion or options.cfg in ("hydra", "all"):
            from lockstep.sweeps.jobs import run_hydra

            register_resolvers()
            run_hydra(config_name, lambda cfg: None, argv)
        else:
            cfg = compose(config_name, overrides, find_stored(overrides))
            if not options.cfg:
                return task(cfg)
            from omegaconf import OmegaConf

            node: Any = OmegaConf.select(without_hydra(cfg), options.package or "")
            say(OmegaConf.to_yaml(node, resolve=options.resolve).rstrip())
        return 0

    return exit_code_of(run)
