# SPDX-License-Identifier: Apache-2.0
"""The reference of public names, from their docstrings, without importing them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path

import vllm_encoder_cg

PACKAGE = Path(vllm_encoder_cg.__file__).parent

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_names() -> dict[str, Path]:
    """Each with the file that defines it."""
    modules = vllm_encoder_cg._PUBLIC_NAMES
    return {
        name: PACKAGE / f"{modules.get(name, '__init__')}.py"
        for name in vllm_encoder_cg.__all__
        if not name.startswith("_")
    }


def render() -> str:
    """All public names, in Markdown."""
    return "\n\n".join(_render(name, file) for name, file in public_names().items())


def _render(name: str, file: Path) -> str:
    tree = ast.parse(file.read_text())
    (node,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef | _Function) and node.name == name
    )
    if not isinstance(node, ast.ClassDef):
        return f"### `{name}`\n\n{_block(_signature(node), _doc(node))}"
    parts = [f"### `{name}`", _doc(node)]
    fields = list(_fields(node))
    if fields:
        lines = [f"- `{field}`{f': {text}' if text else ''}" for field, text in fields]
        parts.append("\n".join(lines))
    for method in node.body:
        if isinstance(method, _Function) and not method.name.startswith("_"):
            parts.append(_block(_signature(method), _doc(method)))
    return "\n\n".join(filter(None, parts))


def _block(signature: str, doc: str) -> str:
    return f"`{signature}`\n\n{doc}".strip()


def _signature(node: _Function) -> str:
    if any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"{node.name}{returns}"
    arguments = ast.unparse(node.args).removeprefix("self").removeprefix(", ")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({arguments}){returns}"


def _doc(node: ast.ClassDef | _Function) -> str:
    """Text as it is, sections with their entries as lists."""
    doc = ast.get_docstring(node) or ""
    text, *sections = _split(doc)
    return "\n\n".join(filter(None, [text, *sections])).replace("``", "`")


def _split(doc: str) -> list[str]:
    """The text before the first section, then each section in Markdown."""
    parts: list[list[str]] = [[]]
    for line in doc.splitlines():
        if line in ("Args:", "Returns:", "Raises:", "Yields:", "Attributes:"):
            parts.append([line])
        else:
            parts[-1].append(line)
    return ["\n".join(parts[0]).strip(), *map(_section, parts[1:])]


def _section(lines: list[str]) -> str:
    head = {"Args:": "Arguments"}.get(lines[0], lines[0].rstrip(":"))
    body = textwrap.dedent("\n".join(lines[1:])).strip()
    if lines[0] == "Returns:":
        return f"*{head}*: {' '.join(body.split())}"
    entries: list[str] = []
    for line in body.splitlines():
        if line.startswith(" ") and entries:
            entries[-1] += f" {line.strip()}"
        elif line:
            entries.append(line)
    return f"*{head}*\n\n" + "\n".join(f"- {entry}" for entry in entries)


def _fields(node: ast.ClassDef) -> list[tuple[str, str]]:
    """Fields of a data class, each with the string below it."""
    found = []
    for i, item in enumerate(node.body):
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        following = node.body[i + 1] if i + 1 < len(node.body) else None
        text = ""
        if isinstance(following, ast.Expr) and isinstance(
            following.value, ast.Constant
        ):
            text = " ".join(inspect.cleandoc(str(following.value.value)).split())
        name = f"{item.target.id}: {ast.unparse(item.annotation)}"
        found.append((name, text.replace("``", "`")))
    return found
