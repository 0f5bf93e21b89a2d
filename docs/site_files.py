"""Hook of mkdocs: pages of the site lie where they lie in the repository, so that their links are the same in both."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

OTHERS = ("README.md", "DESIGN.md", "CONTRIBUTING.md", "examples/README.md")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """docs/x.md at docs/x, and the pages that are not in that folder beside it."""
    root, docs = Path(config.config_file_path).parent, Path(config.docs_dir)

    def placed(path: str) -> File:
        return File(path, str(root), config.site_dir, config.use_directory_urls)

    own = [file for file in files if file.src_dir and Path(file.src_dir) == docs]
    others = [file for file in files if file not in own]  # of the theme
    moved = [placed(f"{docs.name}/{file.src_uri}") for file in own]
    return Files([*others, *moved, *map(placed, OTHERS)])
