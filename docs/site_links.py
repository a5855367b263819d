"""A hook of mkdocs: replaces links to files outside docs/, which have no page on the site, by their names."""

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#]*)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace `[text](../file)` where the file is outside of docs/."""
    folder = posixpath.dirname(page.file.src_uri)

    def name(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if not path.startswith("../"):
            return link[0]
        text, path = link[1], path.removeprefix("../")
        return text if path in text or path == "README.md" else f"{text} (`{path}`)"

    return LINK.sub(name, markdown)
