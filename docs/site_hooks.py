"""Hooks of mkdocs (mkdocs.yml): add pages from outside docs/, and resolve links that lead there.

README.md is the first page of the site, and the notebook is a page. A link to a file that is no
page leads to the repository at SITE_REPOSITORY, which the workflow sets; without it, the link
becomes plain text.
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
        files.append(
            File.generated(
                config, page, content=notebook_page(text) if source.endswith(".ipynb") else text
            )
        )
    return files


def notebook_page(notebook: str) -> str:
    """Return the cells of a notebook as markdown, without outputs."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(notebook)["cells"]]
    return "\n\n".join(
        f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells
    )


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = SOURCE_OF.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def resolved(link: re.Match[str]) -> str:
        text, (place, _, anchor) = link[1], link[2].partition("#")
        path = normpath(join(dirname(source), place))
        if "://" in place or not place or not (ROOT / path).exists():
            return link[0]  # mkdocs warns if it leads nowhere
        target = PAGE_OF.get(path, path.removeprefix("docs/"))
        if not files.get_file_from_path(target):
            if not config.extra["repository"]:
                return text
            target = f"{config.extra['repository']}/blob/main/{path}"
        return f"[{text}]({target}{anchor and '#' + anchor})"

    return LINK.sub(resolved, markdown).replace('src="docs/', 'src="')  # README's pictures are HTML
