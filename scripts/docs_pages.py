"""A hook of mkdocs: pages of the repository's root join the site, and links that lead out of docs/ still lead somewhere.

In the repository a page links to other files by their relative paths. On the site a link to a page of the root leads to its copy, a
figure of scripts/bench/results is copied, and a link to any other file of the repository becomes that file's path in plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {name: f"{name.lower()}" for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")}
"""Page of the root -> page of the site."""
FIGURES = "scripts/bench/results/"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root, and the figures of the benches."""
    for name, target in PAGES.items():
        files.append(File.generated(config, target, content=(ROOT / name).read_text()))
    for path in sorted((ROOT / FIGURES).glob("*.[ps][nv]g")):
        files.append(File.generated(config, f"figures/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Lead every link to its place on the site."""
    source = page.file.src_uri
    of_root = {target: name for name, target in PAGES.items()}
    place = of_root.get(source, f"docs/{source}")

    def lead(match: re.Match[str]) -> str:
        mark, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        if wanted in PAGES:
            uri = PAGES[wanted]
        elif wanted.startswith("docs/"):
            uri = wanted.removeprefix("docs/")
        elif wanted.startswith(FIGURES) and mark:
            uri = f"figures/{posixpath.basename(wanted)}"
        else:
            return f"{text} (`{wanted}`)" if text.strip("`") != wanted else f"`{wanted}`"
        return f"{mark}[{text}]({posixpath.relpath(uri, posixpath.dirname(source) or '.')}{anchor})"

    return _LINK.sub(lead, markdown)
