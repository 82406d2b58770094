"""What Hydra and YAML say of a config, in one sentence that says what to write."""

import difflib
import re
from pathlib import Path

from lockstep.config.declared import missing_option
from lockstep.runs.redact import redact_text

MISPLACED = re.compile(r"In '(?P<yaml>[^']+)': Could not override '(?P<group>[\w/]+)@")
NO_GROUP = re.compile(r"In '(?P<yaml>[^']+)': Could not override '(?P<group>[\w/]+)'. No match")
TWICE = re.compile(r"^(?P<group>[\w/]+) appears more than once|^Multiple values for (?P<other>[\w/]+)\.")
NOISE = ("full_key:", "object_type=", "reference_type=")


def one_sentence(error: Exception, overrides: list[str], configs: Path) -> str:
    """Of a fault in a yaml that is known what is meant, else Hydra's without line breaks, colours and advice.

    Args:
        error: of Hydra, OmegaConf or YAML.
        overrides: of the command line.
        configs: the folder of all options.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if hasattr(error, "problem_mark"):  # YAML's
        mark, problem = error.problem_mark, getattr(error, "problem", "")
        return redact_text(f"{mark.name} is no YAML: {problem} in line {mark.line + 1}, column {mark.column + 1}.")
    text = " ".join(line for line in lines if not line.startswith(NOISE))
    if meant := _of_defaults(text, getattr(error, "missing_cfg_file", None), overrides, configs):
        return redact_text(meant)
    cause = error.__cause__
    if cause is not None and str(cause) and str(cause).splitlines()[0] not in text:
        text += f" ({str(cause).splitlines()[0]})"
    said = f" (from the overrides: {' '.join(overrides)})" if overrides else ""
    return redact_text(f"{text}{said}; python src/train.py --help lists what there is.")


def _of_defaults(text: str, missing: str | None, overrides: list[str], configs: Path) -> str | None:
    """What is wrong in a yaml's defaults list; None where it is something else."""
    if missing:
        group, _, name = missing.partition("/")
        if (configs / (inner := name.partition("/")[0])).is_dir():
            return _with_slash(f"{group}/….yaml", inner)
        if instead := missing_option(group, name.removesuffix(".yaml"), configs):
            return instead if f"{group}={name}" in overrides else f"{instead} It stands in the defaults of a yaml."
    if found := MISPLACED.search(text):
        folder, _, inner = found["group"].rpartition("/")
        if folder and found["yaml"].startswith(f"{folder}/"):
            return _with_slash(f"{found['yaml']}.yaml", inner)
        return f"{found['yaml']}.yaml: its first line has to be `# @package _global_`."
    if found := NO_GROUP.search(text):
        groups = [path.name for path in sorted(configs.iterdir()) if path.is_dir()]
        close = difflib.get_close_matches(found["group"], groups, 1)
        there = f"did you mean /{close[0]}?" if close else f"there is {', '.join(groups)}."
        return f"{found['yaml']}.yaml: there is no group /{found['group']} to override: {there}"
    if found := TWICE.search(text):
        group = found["group"] or found["other"]
        return f"{group} is chosen twice: a yaml's defaults choose another one by `- override /{group}: NAME`."
    return None


def _with_slash(yaml: str, group: str) -> str:
    return f"{yaml}: its defaults choose another {group} by `- override /{group}: NAME`, with the slash."


def without_value(words: list[str], place: int) -> str:
    """Of a key with no value: with the word behind it, if that is one."""
    behind = [word for word in words[place + 1 : place + 2] if not re.search(r"[=~]", word)]
    return f"{words[place]} has no value: write {words[place]}={''.join(behind) or 'VALUE'}."
