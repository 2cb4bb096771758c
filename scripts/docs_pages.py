"""MkDocs hook: the pages that are not in docs/, and the links to them.

README, CHANGELOG and others are added to the site as they are. All links in the repository are relative to the file
that they are in, so that they work wherever the files are read; links to these files are redirected to their pages.
The API reference gets one page per package, with one section per module.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# A file of the repository → its path in the site.
REPOSITORY_FILES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmark-scripts.md",
    "LICENSE": "LICENSE",
}
SOURCES = {page: source for source, page in REPOSITORY_FILES.items()}
PACKAGES = (
    "demo",
    "inference",
    "exporters",
    "flower",
    "run",
    "fleet",
    "costs",
    "methods",
    "training",
    "models",
    "data",
    "config",
)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    root = Path(config.config_file_path).parent
    for source, page in REPOSITORY_FILES.items():
        files.append(File.generated(config, page, abs_src_path=str(root / source)))
    package = root / "src" / "vitfleet"
    for name, content in _api_pages(package):
        files.append(File.generated(config, f"api/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that are relative to the repository into links that are relative to the site."""
    here = page.file.src_uri
    folder = posixpath.dirname(SOURCES.get(here, f"docs/{here}"))

    def redirect(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link["path"]))
        if target in REPOSITORY_FILES:
            target = REPOSITORY_FILES[target]
        elif target.startswith("docs/"):
            target = target.removeprefix("docs/")
        else:
            return link[0]  # not part of the site: MkDocs warns about it
        return posixpath.relpath(target, posixpath.dirname(here) or ".") + (link["anchor"] or "")

    return LINK.sub(redirect, markdown)


def _api_pages(package: Path) -> Iterator[tuple[str, str]]:
    """Yield name and Markdown of every page of the API reference but its index."""
    yield "vitfleet", "# vitfleet\n\n::: vitfleet\n    options:\n      show_submodules: false\n"
    shared = [f"vitfleet.{path.stem}" for path in sorted(package.glob("[!_]*.py")) if path.stem != "api"]
    yield "shared", "# Shared modules\n\n" + _sections(shared)
    for name in PACKAGES:
        yield name, _package_sections(package / name, f"vitfleet.{name}")


def _package_sections(folder: Path, name: str, heading: str = "#") -> str:
    """Return a package's introduction, then its modules, then the packages inside it."""
    introduction = f"{heading} {name}\n\n::: {name}\n    options:\n      members: false\n\n"
    modules = _sections([f"{name}.{path.stem}" for path in sorted(folder.glob("[!_]*.py"))])
    inner = (path.parent for path in sorted(folder.glob("*/__init__.py")))
    return "\n".join(
        [introduction + modules, *(_package_sections(path, f"{name}.{path.name}", "##") for path in inner)]
    )


def _sections(modules: list[str]) -> str:
    options = "    options:\n      show_root_heading: true\n      show_root_full_path: true\n"
    return "\n".join(f"::: {module}\n{options}      show_root_toc_entry: true\n" for module in modules)
