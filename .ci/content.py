"""Check each Python file against its line TOKENS COLUMNS NAME of .ci/content.

TOKENS limits content: the file's names, numbers, strings and operators. Comments, docstrings and
layout are free, and so is the length of a name, so packing lines does not help. An f-string is one
token on every Python version. COLUMNS is the line length that .ci/run gives to ruff.
"""

import ast
import pathlib
import sys
import tokenize

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FREE = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER"}


def tokens_of(path):
    """Count the code tokens of the file at `path`."""
    docstring_lines = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            docstring = node.body[0]
            docstring_lines.update(range(docstring.lineno, docstring.end_lineno + 1))

    count = 0
    depth = 0  # of f-strings: Python 3.12 and later split them into tokens
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            kind = tokenize.tok_name[token.type]
            if kind == "FSTRING_END":
                depth -= 1
            elif depth == 0 and kind not in FREE and token.start[0] not in docstring_lines:
                count += 1
            if kind == "FSTRING_START":
                depth += 1
    return count


def main():
    limits = {}
    for line in (ROOT / ".ci" / "content").read_text().splitlines():
        tokens, _, name = line.split()
        limits[name] = int(tokens)

    wrong = []
    for name, limit in limits.items():
        count = tokens_of(ROOT / name)
        print(f"{count:>7} of {limit:>6} code tokens  {name}")
        if count > limit:
            wrong.append(f"{name}: {count - limit} over its limit of {limit} code tokens")
    for path in ROOT.glob("*.py"):
        if path.name not in limits:
            wrong.append(f"{path.name}: has no line in .ci/content")
    if wrong:
        sys.exit("\n".join([*wrong, "simplify something: a limit only goes down"]))


if __name__ == "__main__":
    main()
