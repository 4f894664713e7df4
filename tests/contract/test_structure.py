"""What the files are: short, citing their papers, and importing only what their place allows."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

import pytest

import idiolect
from idiolect import catalogue

ROOT = Path(idiolect.__file__).parent
FILES = sorted(p for p in ROOT.rglob("*.py"))
METHODS = [p for p in FILES if p.parent.name in ("methods", "wrap") and p.name != "__init__.py"]
CONTRACT = ("idiolect.method.", "idiolect.tree.")
LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_lines(source: str) -> int:
    """Lines that hold code: no docstring, no comment, nothing blank."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def imports(path: Path) -> dict[str, int]:
    """Every module or name that a file imports, wherever it does, in full; and the line."""
    found = {}
    package = ("idiolect", *path.relative_to(ROOT).parts[:-1])
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []  # names for annotations
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name: node.lineno for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            found |= {f"{module}.{alias.name}": node.lineno for alias in node.names}
    return found


def test_lines_of_code_are_counted_right():
    source = '"""Doc."""\n\nimport os\n# no\nX = (\n    1,\n)  # yes\n\n\ndef f():\n    """Doc\n\n    two."""\n    return """a\nb"""\n'
    assert code_lines(source) == 1 + 3 + 1 + 2


def test_fedrep_is_at_most_25_lines_and_no_method_more_than_150():
    length = {p.stem: code_lines(p.read_text()) for p in METHODS}
    assert length["fedrep"] <= 25
    assert {k: n for k, n in length.items() if n > 150} == {}


def test_the_loop_is_short():
    text = (ROOT / "engine" / "loop.py").read_text()
    assert code_lines(text) <= 100


@pytest.mark.parametrize("path", METHODS, ids=named)
def test_methods_import_only_the_contract_torch_and_the_standard_library(path):
    for name, line in imports(path).items():
        top = name.partition(".")[0]
        allowed = name.startswith(CONTRACT) or top == "torch" or top in sys.stdlib_module_names
        assert allowed, f"line {line}: {name}"


def test_the_engine_imports_no_method():
    for path in FILES:
        if path.parent.name == "engine":
            wrong = [
                n for n in imports(path) if n.startswith(("idiolect.methods", "idiolect.wrap", "idiolect.catalogue"))
            ]
            assert not wrong, named(path)


def test_nothing_imports_the_command_line():
    for path in FILES:
        if path.name not in ("__main__.py", "cli.py"):
            assert not [n for n in imports(path) if re.match(r"idiolect\.cli\b", n)], named(path)


def test_the_contract_imports_no_method_and_no_backend():
    for name in ("tree.py", "method.py", "client.py", "task.py", "optim.py"):
        path = ROOT / name
        wrong = [
            n for n in imports(path) if re.match(r"idiolect\.(methods|wrap|catalogue|experiment|running|data)\b", n)
        ]
        assert not wrong, name


def test_no_file_is_called_by_what_says_nothing():
    vague = re.compile(r"util|helper|manager|base|common|misc")
    assert [named(p) for p in FILES if vague.search(p.stem)] == []
    assert [named(p) for p in FILES if p.name != "__init__.py" and code_lines(p.read_text()) == 0] == []


@pytest.mark.parametrize("name", catalogue.names())
def test_a_docstring_cites_the_paper_and_says_what_departs_from_it(name):
    kind = catalogue.find(name)
    text = " ".join((kind.__doc__ or "").split())
    called = re.match(r"([\w-]+)[.:] ", text)
    assert called is not None
    assert called[1].replace("-", "").lower() == name, "it begins with the method's name, as the paper writes it"
    assert "Departs from the paper" in text
    if "folklore" not in text:
        assert re.match(r"[\w-]+\. ([\w' ]+ et al\.|[\w' ,]+ and \w+|Anonymous), ", text), "then the authors"
        assert re.search(r"\b(19|20)\d\d\b|under review", text.partition("Departs")[0])
        assert re.search(r"([Aa]lgorithm|[Ss]ection|eq\.)s? \d", text.partition("Departs")[0])


@pytest.mark.parametrize("name", catalogue.names())
def test_a_file_holds_one_method_and_a_docstring_of_it(name):
    (path,) = [p for p in METHODS if p.stem == name]
    tree = ast.parse(path.read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert [c.name.lower() for c in classes] == [name]
    assert path.read_text().startswith("from __future__ import annotations")
