"""The page of errors, from the source: every message that the package raises, with its placeholders."""

import ast
from pathlib import Path

ERRORS = {
    "ConfigurationError": "A set-up that cannot work: sizes, groups, options, or a missing piece.",
    "BatchError": "A batch that cannot be striped, or a striped batch that does not fit its ranks.",
    "UnsupportedFeatureError": "A feature of the model, the Trainer or the batch that would not be exact.",
    "KernelUnavailableError": "A block kernel that cannot run here.",
}


def messages(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """For each error, the modules and messages of its `raise` statements, in the order of the source."""
    found: dict[str, list[tuple[str, str]]] = {name: [] for name in ERRORS}
    for path in sorted(folder.rglob("*.py")):
        module = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else None
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ERRORS:
                found[call.func.id].append((module, _text(call.args[0])))
    return found


def errors_page(folder: Path) -> str:
    """The page as MyST markdown."""
    lines = [
        "# Errors\n",
        "Every error of hf_striped is a `StripedError`, which is a `ValueError`. A message states the rule, what was received and "
        "the fix. These are all of them; `...` stands for what is filled in.\n",
    ]
    for name, listed in messages(folder).items():
        lines += [f"## {name}\n", f"{ERRORS[name]}\n"]
        for module, text in listed:
            lines.append(f"- `{module}`\n\n  ```text\n  {text}\n  ```\n")
    return "\n".join(lines)


def _text(node: ast.expr) -> str:
    """The literal parts of a message, `...` for the others."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "..."
