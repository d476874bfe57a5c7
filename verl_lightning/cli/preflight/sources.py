"""Classes and their options, read from source files, as importing them takes longer than all early checks."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_lightning.cli.preflight.option_types import ANYTHING, NULL, OptionType, join

PACKAGE = "verl_lightning"
CLASS = re.compile(r"^class (\w+)(?:\[.*?\])?(?:\(([^)]*)\))?:", re.MULTILINE)
DEFINES_ANYTHING = {"*", "__getattr__", "globals", "locals", "vars", "exec", "eval", "setattr"}
"""Names in a file that may give it names which nobody reads there."""

SCALARS = ("int", "float", "str", "bool")
SEQUENCES = ("list", "List", "Sequence", "Iterable", "set", "tuple", "Tuple")


@dataclass(frozen=True, eq=False)
class Source:
    """A parsed module."""

    module: str
    """Dotted name of the module."""

    tree: ast.Module

    @functools.cached_property
    def definitions(self) -> dict[str, ast.ClassDef | ast.expr]:
        """Classes and assigned expressions at the top level, by name."""
        found: dict[str, ast.ClassDef | ast.expr] = {}
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                found[node.target.id] = node.value
        return found

    @functools.cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Module and name of what is imported from other modules, by the name that it has here."""
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom) and node.level == 0)
        return {alias.asname or alias.name: (node.module or "", alias.name) for node in nodes for alias in node.names}


@dataclass(frozen=True, eq=False)
class ClassSource:
    """The source of a class."""

    source: Source
    node: ast.ClassDef

    @property
    def name(self) -> str:
        """Name of the class, without its module."""
        return self.node.name

    @property
    def is_ours(self) -> bool:
        """True if the class is one of this package."""
        return self.source.module.startswith(f"{PACKAGE}.")

    @property
    def is_dataclass(self) -> bool:
        """True if the class is a dataclass, whose fields are its options."""
        return any("dataclass" in ast.unparse(decorator) for decorator in self.node.decorator_list)

    @functools.cached_property
    def options(self) -> Mapping[str, OptionType] | None:
        """Types of the constructor's arguments by name; None where unknown, as for one that takes any keyword."""
        methods = {node.name: node for node in self.node.body if isinstance(node, ast.FunctionDef)}
        if "__init__" in methods:
            return self.arguments("__init__")
        found: dict[str, OptionType] = {}
        for base in self.node.bases:
            parent = find_class(ast.unparse(base).partition("[")[0], self.source)
            inherited = None if parent is None else parent.options
            if inherited is None and not is_plain_base(base):
                return None
            found |= inherited or {}
            if inherited and not self.is_dataclass:
                break  # the first constructor counts
        fields = [node for node in self.node.body if isinstance(node, ast.AnnAssign)] if self.is_dataclass else []
        own = {
            node.target.id: read_type(node.annotation, self.source)
            for node in fields
            if isinstance(node.target, ast.Name)
        }
        return found | own

    def arguments(self, method: str) -> Mapping[str, OptionType] | None:
        """Returns the types of the arguments of one of the class's methods by name; None if it takes any keyword."""
        (node,) = (part for part in self.node.body if isinstance(part, ast.FunctionDef) and part.name == method)
        if node.args.kwarg is not None:
            return None
        arguments = [*node.args.args[1:], *node.args.kwonlyargs]
        return {
            argument.arg: ANYTHING if argument.annotation is None else read_type(argument.annotation, self.source)
            for argument in arguments
        }


def is_plain_base(base: ast.expr) -> bool:
    """Tells whether a base class has no constructor of its own: `Protocol`, `ABC` and the like."""
    return ast.unparse(base).partition("[")[0] in ("ABC", "Protocol", "Generic", "NamedTuple", "object")


@functools.cache
def read_source(module: str) -> Source | None:
    """A module's source; None if it is not found or is not Python."""
    path = module_file(module)
    if path is None:
        return None
    try:
        return Source(module, ast.parse(path.read_bytes()))
    except (OSError, SyntaxError):
        return None


def module_file(module: str) -> Path | None:
    """The file of a module, found without importing anything but this package itself."""
    parts = module.split(".")
    # The folders of a package need not lie in it: an editable installation may map them.
    depth = 2 if parts[0] == PACKAGE and len(parts) > 1 else 1
    spec = importlib.util.find_spec(".".join(parts[:depth]))
    if spec is None or spec.origin is None or not spec.has_location:
        return None
    path = Path(spec.origin)
    if len(parts) > depth:
        if path.name != "__init__.py":
            return None
        path = path.parent.joinpath(*parts[depth:], "__init__.py")
    if not path.is_file():
        path = path.parent.with_suffix(".py")
    return path if path.is_file() else None


def names_without(path: Path, name: str) -> set[str] | None:
    """The names that a Python file defines; None if a name is among them, or may be."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (OSError, SyntaxError):
        return None
    words = {node.id for node in nodes if isinstance(node, ast.Name)}
    aliases = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    defined = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    names = words | defined | {alias.asname or alias.name.partition(".")[0] for alias in aliases}
    return None if name in names or names & DEFINES_ANYTHING else names


def find_class(name: str, source: Source | None = None) -> ClassSource | None:
    """The class of a dotted import path, or of a name in a module; None if it is not found."""
    found = find(name, source)
    if found is None:
        return None
    own_source, definition = found
    return ClassSource(own_source, definition) if isinstance(definition, ast.ClassDef) else None


def find(name: str, source: Source | None) -> tuple[Source, ast.ClassDef | ast.expr] | None:
    """Finds the definition of a name and the module that holds it, through imports; None if it is not found."""
    seen: set[tuple[str, str]] = set()
    if source is None:
        module, _, name = name.rpartition(".")
        source = read_source(module) if module else None
    while source is not None and (source.module, name) not in seen:
        seen.add((source.module, name))
        if name in source.definitions:
            return source, source.definitions[name]
        module, name = source.imports.get(name, ("", name))
        source = read_source(module) if module else None
    return None


def read_type(node: ast.expr, source: Source) -> OptionType:
    """Reads from an annotation which values it allows."""
    if isinstance(node, ast.Constant):
        if node.value is None:
            return NULL
        return read_type(ast.parse(node.value, mode="eval").body, source) if isinstance(node.value, str) else ANYTHING
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return join([read_type(node.left, source), read_type(node.right, source)])
    if isinstance(node, ast.Subscript):
        return read_subscript(node, source)
    if isinstance(node, ast.Name) and node.id in SCALARS:
        return OptionType(scalars=(node.id,))
    found = find(node.id, source) if isinstance(node, ast.Name) else None
    if found is None:
        return ANYTHING
    module, definition = found
    if module.module in sys.stdlib_module_names - {"pathlib"}:  # such as `timedelta`, a text
        return ANYTHING
    if not isinstance(definition, ast.ClassDef):
        return read_type(definition, module)
    meant = ClassSource(module, definition)
    return OptionType(parts=(meant,)) if meant.is_dataclass else OptionType(bases=(meant,))


def read_subscript(node: ast.Subscript, source: Source) -> OptionType:
    """Reads from a generic annotation, such as ``list[int]``, which values it allows."""
    kind = ast.unparse(node.value).rpartition(".")[2]
    inner: Sequence[ast.expr] = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if kind in ("Union", "Optional"):
        types = [read_type(part, source) for part in inner]
        return join([*types, NULL] if kind == "Optional" else types)
    if kind == "Literal" and all(isinstance(part, ast.Constant) and type(part.value) in (str, int) for part in inner):
        return OptionType(choices=tuple(str(part.value) for part in inner if isinstance(part, ast.Constant)))
    if kind in SEQUENCES:
        return OptionType(items=read_type(inner[0], source))
    return ANYTHING


@functools.cache
def classes_of(package: str) -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    """Modules of a package that define a class, each with the names of its bases, by the class's name."""
    found: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for module, path in module_files(package):
        for match in CLASS.finditer(path.read_text(encoding="utf-8")):
            bases = [base.strip().partition("[")[0].rpartition(".")[2] for base in (match[2] or "").split(",")]
            found.setdefault(match[1], []).append((module, tuple(base for base in bases if base)))
    return found


def module_files(package: str) -> Iterator[tuple[str, Path]]:
    """Every module below a package, with its file."""
    root = module_file(package)
    if root is None:
        return
    for path in sorted(root.parent.iterdir()):
        name = f"{package}.{path.stem}"
        if path.is_dir() or path.suffix == "":  # a file without one may stand where a link should be
            yield from module_files(name)
        elif path.suffix == ".py" and path.name != "__init__.py":
            yield name, path


def subclasses(base: str, package: str = PACKAGE) -> list[str]:
    """Lists the names of all classes of a package below a base class."""
    known = classes_of(package)
    direct = [name for name, places in known.items() if any(base in bases for _, bases in places)]
    return [below for name in direct for below in (name, *subclasses(name, package))]


def named_class(name: str, package: str = PACKAGE) -> ClassSource | None:
    """The class of a package with a name; None if there is none, or if there are several."""
    places = classes_of(package).get(name, [])
    return find_class(f"{places[0][0]}.{name}") if len(places) == 1 else None
