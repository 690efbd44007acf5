"""The project's own source files, parsed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path, type_checking: bool = True) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, also inside functions. `from a import b` yields a.b.

    `type_checking`: also those under `if TYPE_CHECKING:`.
    """
    blocks = [n for n in ast.walk(tree(path)) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    skipped = set() if type_checking else {line for n in blocks for line in range(n.lineno, n.body[-1].lineno + 1)}
    for node in ast.walk(tree(path)):
        if getattr(node, "lineno", None) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
