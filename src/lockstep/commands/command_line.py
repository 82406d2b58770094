"""Read a script's command line: Hydra's options, and the overrides that compose the config."""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.config.compose import (
    CONFIGS,
    compose,
    register_resolvers,
    remove_hydra_node,
    unresolved,
    whole_config,
)
from lockstep.config.overrides import quote_value
from lockstep.config.schema import dotted_keys, help_text
from lockstep.config.suggestions import nearest_key
from lockstep.process.errors import CommandEnded, UserError
from lockstep.process.output import configure_logging, print_result
from lockstep.process.redact import refuse_secrets
from lockstep.records.config import Config

CONFIG_FLAGS = ("--config-name", "-cn", "--config-path", "-cp")
FLAGS = (("help", "h"), ("multirun", "m"), ("resolve", "R"), ("shell-completion", "sc"))


@dataclass(frozen=True)
class Command:
    """A command line: Hydra's options and the overrides.

    Args:
        config_name: the name of the yaml in configs/ that is composed.
        options: Hydra's options, as --cfg.
        overrides: such as `model=alexnet`, in any order.
    """

    config_name: str
    options: argparse.Namespace
    overrides: list[str]

    def compose(self, stored: Config | None = None) -> dict[str, Any]:
        """Return the plain config, with `choices` (the option of each group) and `overrides`.

        Args:
            stored: the config of the run that the overrides name, as by resume=; its options count
                first.
        Raises:
            UserError: a misspelt option or key, a value of the wrong type, or a secret.
            CommandEnded: --cfg job: the config has been printed.
        """
        cfg = compose(self.config_name, self.overrides, stored)
        if self.options.cfg:
            _print_config(cfg, self.options)
            raise CommandEnded

        config = whole_config(cfg)
        configure_logging(verbose=config["verbose"], quiet=config["quiet"])
        refuse_secrets(config)
        if config.get("snapshot"):
            from lockstep.commands.snapshot import refuse_if_not_snapshot

            refuse_if_not_snapshot()
        return config


def read_command(config_name: str, argv: list[str], description: str) -> Command:
    """Return the command, unless this function answers it.

    It answers --help, a sweep, Hydra's own information, and a snapshot of the code.

    Args:
        description: the script's docstring, for --help.
    Raises:
        UserError: an option of another program, or a folder that is not there.
        CommandEnded: the command has been answered.
    """
    if "snapshot=true" in (word.lower().lstrip("+") for word in argv):
        from lockstep.commands.snapshot import run_from_snapshot

        run_from_snapshot(argv)

    command = _parse(config_name, argv)
    options = command.options
    if options.help:
        print_result(help_text(CONFIGS, config_name, description))
        raise CommandEnded
    if options.multirun and (options.cfg or options.info):
        raise UserError("-m runs the jobs of a sweep, --cfg and --info run none: give one of them.")
    if options.multirun:
        from lockstep.sweeps.jobs import run_sweep

        raise CommandEnded(run_sweep(config_name, command.overrides))
    if options.info or options.shell_completion or options.cfg in ("hydra", "all"):
        from lockstep.sweeps.jobs import run_hydra

        register_resolvers()
        run_hydra(config_name, lambda cfg: None, argv)
        raise CommandEnded
    return command


def take_flag(argv: list[str], name: str) -> tuple[list[str], bool]:
    """Return the arguments without a flag of the script, as --json, and whether it was given."""
    return [word for word in argv if word != name], name in argv


def _parse(config_name: str, argv: list[str]) -> Command:
    """Return Hydra's options and the overrides; --config-dir becomes an override."""
    for word in argv:
        # argparse would read -cn as -c n.
        if word.partition("=")[0] in CONFIG_FLAGS:
            raise UserError(
                f"{word}: choose a recipe as experiment=NAME; --config-dir adds a folder of yamls."
            )
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for name, short in FLAGS:
        parser.add_argument(f"--{name}", f"-{short}", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--info", "-i", nargs="?", const="all")

    options, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        raise _unknown_flag_error(unknown[0], config_name)

    command = Command(config_name, options, list(options.overrides))
    if not options.config_dir:
        return command
    folder = Path(options.config_dir).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"--config-dir {options.config_dir} is not a folder.")
    search_path = f"hydra.searchpath=[{quote_value(f'file://{folder}')}]"
    return replace(command, overrides=[*command.overrides, search_path])


def _unknown_flag_error(flag: str, config_name: str) -> UserError:
    """Return the error for an option of another program, as --epochs."""
    name, _, value = flag.partition("=")
    key = name.lstrip("-").replace("-", "_")
    keys = list(dotted_keys(unresolved(compose(config_name, []))))
    close_key = nearest_key(key, keys) or key
    return UserError(
        f"{flag}: keys are written without dashes: {close_key.rstrip('=')}={value or 'VALUE'}."
    )


def _print_config(cfg: Any, options: argparse.Namespace) -> None:
    from omegaconf import OmegaConf

    node: Any = OmegaConf.select(remove_hydra_node(cfg), options.package or "")
    print_result(OmegaConf.to_yaml(node, resolve=options.resolve).rstrip())
