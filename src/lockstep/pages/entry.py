"""A run as the pages meet it: its facts, what a person noted, and where its page and pictures lie."""

from dataclasses import dataclass, field
from functools import cached_property

from lockstep.pages.facts import RunFacts
from lockstep.pages.figures import has_curves
from lockstep.pages.json_values import as_text
from lockstep.pages.markdown import plain, slug
from lockstep.pages.notes import Note

RESERVED_PAGES = ("readme", "older-runs", "notes", "runs", "figures")


@dataclass
class Entry:
    facts: RunFacts
    note: Note = field(default_factory=Note)
    page: str = ""  # the file that holds its details
    reports: tuple[str, ...] = ()  # links in markdown
    # Curves, confusion matrix and calibration, where they do not lie in figures/.
    pictures: tuple[str, str, str] | None = None

    @property
    def run_id(self) -> str:
        return self.facts.run_id

    @property
    def title(self) -> str:
        return self.note.name or self.run_id

    @property
    def tags(self) -> list[str]:
        return self.facts.tags if self.note.tags is None else list(self.note.tags)

    @property
    def anchor(self) -> str:
        return anchor(self.run_id)

    @cached_property
    def link(self) -> str:
        return f"[{plain(self.title, 60)}]({self.page or experiment_page_name(self.facts)}#{self.anchor})"

    @property
    def folder(self) -> str:
        """The run folder, seen from the repository where it lies inside."""
        return as_text(self.facts.source.get("folder"))

    @property
    def has_tensorboard(self) -> bool:
        return self.facts.source.get("tensorboard") is True

    @cached_property
    def has_curves(self) -> bool:
        return has_curves(self.facts)

    @property
    def has_confusion(self) -> bool:
        return self.facts.confusion is not None

    @property
    def curves_file(self) -> str:
        return self.pictures[0] if self.pictures else f"figures/{self.run_id}.svg"

    @property
    def confusion_file(self) -> str:
        return self.pictures[1] if self.pictures else f"figures/{self.run_id}-confusion.svg"

    @property
    def calibration_file(self) -> str:
        return self.pictures[2] if self.pictures else f"figures/{self.run_id}-calibration.svg"


def anchor(run_id: str) -> str:
    """An explicit anchor: GitHub prefixes what it makes itself, and titles may be edited."""
    return "run-" + run_id.lower().replace(".", "-")


def experiment_slug(facts: RunFacts) -> str:
    name = slug(facts.experiment)
    taken = name in RESERVED_PAGES or name.startswith(("compare-", "older-")) or "-older-" in name
    return f"experiment-{name.replace('-older-', '-old-')}" if taken else name


def experiment_page_name(facts: RunFacts) -> str:
    return f"{experiment_slug(facts)}.md"
