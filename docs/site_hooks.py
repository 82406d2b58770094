"""What mkdocs (mkdocs.yml) asks for: pages that lie outside docs/, and links that leave it.

README.md is the site's first page, and the notebook a page. A link to what is no page leads to the repository at
SITE_REPOSITORY, which the workflow sets; where that is not set, its words are left.
"""

import json
import re
from pathlib import Path
from posixpath import dirname, join, normpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGE_OF = {
    "README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md", "docs/notebook.ipynb": "notebook.md",
}  # fmt: skip
SOURCE_OF = {page: source for source, page in PAGE_OF.items()}
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGE_OF.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=notebook_page(text) if source.endswith(".ipynb") else text))
    return files


def notebook_page(notebook: str) -> str:
    """Markdown of a notebook's cells, without outputs."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(notebook)["cells"]]
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = SOURCE_OF.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def led(link: re.Match[str]) -> str:
        words, (place, _, anchor) = link[1], link[2].partition("#")
        path = normpath(join(dirname(source), place))
        if "://" in place or not place or not (ROOT / path).exists():
            return link[0]  # where it leads nowhere, mkdocs says so
        target = PAGE_OF.get(path, path.removeprefix("docs/"))
        if not files.get_file_from_path(target):
            if not config.extra["repository"]:
                return words
            target = f"{config.extra['repository']}/blob/main/{path}"
        return f"[{words}]({target}{anchor and '#' + anchor})"

    return LINK.sub(led, markdown).replace('src="docs/', 'src="')  # README's pictures have a width: HTML
