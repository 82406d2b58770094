"""No figure without its source: ends with 1 where a number in a document is not what it comes from (in `make check`).

    python docs/check_figures.py

What scripts write (the logbook's pages and pictures, the pages of benchmarks/, the options) is written anew from its
sources and compared. A figure in a text by hand stands in the same words on such a page that its paragraph names, or
is one of STATED. CHANGELOG.md tells what was measured once, and is not checked.
"""

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path += [str(REPOSITORY / "docs"), str(REPOSITORY / "src"), str(REPOSITORY / "benchmarks")]

import make_options  # noqa: E402 the line above puts them on the path
import make_readme  # noqa: E402

from lockstep.pages.build import not_up_to_date  # noqa: E402

MEASURED = [*(f"logbook/measurements/{name}.md" for name in (
    "assignment_rehearsal", "augmentation_pays", "batch_search", "estimates", "estimates_gpu", "largest_batch",
    "memory_per_rank", "parity", "ranks", "rehearsals", "s3", "s3_steps", "statistics_cost",
)), "benchmarks/faults.md", "benchmarks/fleet.md", "benchmarks/scaling.md"]  # fmt: skip
UNIT = r"(?: min \d+ s| ?%| ×(?! \d)| images/s| (?:ms|s|min|h|points|[KMG]i?B)\b)"
FIGURE = re.compile(rf"(?<![\w.,])\d[\d,]*(?:\.\d+)?{UNIT}")
# Figures that no run of ours measured: of others' publications, or what a program does. {document: the words}
STATED = {
    "SECURITY.md": ["over 1 GiB"],
    "configs/experiment/alexnet_cifar10.yaml": ["with 73.97 %", "(41.8 min)", "and 73.52 %", "(14.6 min)"],
    "configs/experiment/cats_vs_dogs.yaml": ["29 s an epoch is published", "TITAN RTX, 93 s"],
    "configs/experiment/convnext_imagenet.yaml": ["82.1 % at 224 px, their"],
    "configs/experiment/deit3_imagenet.yaml": ["81.4 % at 224 px for it: their figure"],
    "configs/experiment/finetune_cifar10.yaml": ["98.1 % on CIFAR-10 at 224 px (its figure"],
    "configs/experiment/mnist.yaml": ["99.22 % in 143 s"],
    "configs/experiment/resnet50_a2.yaml": ["79.8 % at 224 px, their figure"],
    "docs/machines.md": ["kills ranks 30 s after"],
    "docs/rehearsal.md": ["an assumed 0.6 GiB"],
}


def pages_that_differ(root: Path) -> list[str]:
    """Pages under `root`, as paths from it, that are not as their sources have them, or have none."""
    found = [page for page, text in written_anew(root).items() if (root / page).read_text() != text]
    without = {str(path.relative_to(root)) for path in (root / "logbook/measurements").glob("*.md")} - {*MEASURED}
    return [*found, *(f"logbook/{file}" for file in not_up_to_date(root / "logbook")), *without]


def written_anew(root: Path) -> dict[str, str]:
    """What the sources under `root` make of every page of benchmarks/ and of the options."""
    pages = {"benchmarks/README.md": make_readme.page(root / "benchmarks/results")}
    pages["docs/options.md"] = make_options.options_page(root / "configs")
    for page in MEASURED:
        results = root / "benchmarks/results" / Path(page).with_suffix(".json").name
        pages[page] = script(Path(page).stem).page(json.loads(results.read_text()))
    return pages


def script(name: str):
    """A benchmark as a module; by its file, since tests have modules of such names too."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", REPOSITORY / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def by_hand(root: Path) -> list[str]:
    """The documents that people write, but for the logbook's notes: a note is its writer's word."""
    documents = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("configs/experiment/*.yaml")]
    documents.append(root / "nullgpu/README.md")
    return sorted({str(path.relative_to(root)) for path in documents} - {"docs/options.md", "CHANGELOG.md"})


def unbound(root: Path, document: str, text: str) -> Iterator[str]:
    """Figures of a document by hand that no page has which their paragraph names."""
    for paragraph in paragraphs(document, text):
        for words in STATED.get(document, ()):
            paragraph = paragraph.replace(words, "")
        sources = [named.read_text().replace("\xa0", " ") for named in pages_named(root, document, paragraph)]
        yield from (
            figure for figure in FIGURE.findall(paragraph) if not any(has(source, figure) for source in sources)
        )


def has(source: str, figure: str) -> bool:
    return re.search(rf"(?<![\w.,]){re.escape(figure)}", source) is not None


def paragraphs(document: str, text: str) -> list[str]:
    """Without what stands in code; a row of a table is one of its own, the head of a yaml is one."""
    if document.endswith(".yaml"):
        return [" ".join(re.findall(r"^# ?(.*)", text, re.MULTILINE))]
    text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return [" ".join(block.split("\n")) for block in re.split(r"\n\s*\n|\n(?=\||- )", text)]


def pages_named(root: Path, document: str, paragraph: str) -> list[Path]:
    names = re.findall(r"[\w./-]+\.md", paragraph)
    places = [base / name for name in names for base in ((root / document).parent, root)]
    written = [root / "logbook", root / "benchmarks"]
    return [p for p in map(Path.resolve, places) if p.exists() and any(p.is_relative_to(w) for w in written)]


def main() -> int:
    wrong = [f"{page}: not as its sources have it; write it anew" for page in pages_that_differ(REPOSITORY)]
    for document in by_hand(REPOSITORY):
        for figure in unbound(REPOSITORY, document, (REPOSITORY / document).read_text()):
            wrong.append(f"{document}: {figure}: on no page that its paragraph names, in these words")
    print("\n".join(wrong) or "every figure has its source")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
