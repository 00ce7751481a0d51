"""Of the site (mkdocs.yml): pages that lie outside docs/, and links to files there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "benchmarks/README.md": "measuring.md"} | {
    name: name for name in ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
}
SHOWN = (".md", ".png", ".jpg", ".svg")  # of docs/
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)]*)?\))")


def on_files(files: Any, config: Any) -> Any:
    for name, page in PAGES.items():
        text = _relinked((ROOT / name).read_text(), ROOT / name, page)
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "reference/onnx.md", content=_onnx_ops()))
    linked: set[Path] = set()
    for path in [*ROOT.glob("docs/**/*.md"), *(ROOT / name for name in PAGES)]:
        targets = ((path.parent / link[2]).resolve() for link in LINK.finditer(path.read_text()))
        linked |= {target for target in targets if _is_copied(target)}
    for target in linked:
        files.append(File.generated(config, f"files/{target.relative_to(ROOT)}", content=target.read_bytes()))
    return files


def _onnx_ops() -> str:
    """The ops of ONNX Runtime, as the library and the exporter say what they are."""
    from sbnet.export.op_table import OPS

    parts = ["# Ops of ONNX Runtime\n\nDomain `sbnet`, version 1: [what they share](../onnxruntime.md#ops)."]
    for op in OPS.values():
        takes, gives = (", ".join(f"`{name}` {kind}" for name, kind in side) for side in (op.inputs, op.outputs))
        numbers = (
            f"`{name}` ({told['type']}, {'required' if told.get('required') else told.get('default', 'optional')})"
            for name, told in op.attributes.items()
        )
        kinds = "; ".join(f"{name}: {', '.join(found)}" for name, found in op.types.items())
        parts.append(
            f"## {op.name}\n\n{op.doc}\n\n- inputs (? optional): {takes}\n- outputs: {gives}\n"
            f"- attributes: {', '.join(numbers) or 'none'}\n- types: {kinds or 'as said'}"
        )
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    here = page.file.src_uri
    if here in PAGES.values() or here == "reference/onnx.md":
        return markdown
    return _relinked(markdown, ROOT / "docs" / here, here)


def _is_copied(target: Path) -> bool:
    """Rows of measurements and code, which the site shows as they are."""
    inside = ROOT / "docs" in target.parents and target.suffix in SHOWN
    return target.is_file() and not inside and target.relative_to(ROOT).as_posix() not in PAGES


def _relinked(text: str, path: Path, page: str) -> str:
    """The text of a file with links as the site has them."""

    def relink(match: re.Match[str]) -> str:
        target = (path.parent / match[2]).resolve()
        name = target.relative_to(ROOT).as_posix() if ROOT in target.parents else ""
        if not target.is_file() or not name:
            return match[0]
        at = PAGES.get(name) or (name.removeprefix("docs/") if not _is_copied(target) else f"files/{name}")
        return match[1] + "../" * page.count("/") + at + match[3]

    return LINK.sub(relink, text)
