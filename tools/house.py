"""Figures of the package: `python tools/house.py` prints them, `tests/unit/test_house.py` has their limits.

A folder has modules and folders, its *rooms*; an *arrow* leads from a room to another one that it imports. A
room that imports no other is on the first *floor*, others are one above the highest of those they import. A
*fragment* is a module that only one other module of its folder imports. Fields of a class are its annotated
names and the attributes that its methods set.
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("__main__", "sft_main")
"""Modules that are programs: what only they import is the program's content, not a fragment."""

MOST_FIELDS = 10
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class House:
    """The modules of one package.

    Attributes:
        root: the folder that holds the package.
        package: its name.
    """

    root: Path = ROOT
    package: str = "yatt"

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """Syntax trees by module."""
        found = {}
        for path in sorted((self.root / self.package).rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
        return found

    def laid_out_by_hand(self) -> int:
        """Number of statements that the formatter leaves alone."""
        paths = (self.root / self.package).rglob("*.py")
        return sum(path.read_text().count("# fmt: skip") for path in paths)

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """The package's modules that each module imports, anywhere in it."""
        return {name: set(self._imports(tree)) - {name} for name, tree in self.trees.items()}

    def _imports(self, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (each.name for each in node.names if each.name in self.trees)
            elif isinstance(node, ast.ImportFrom) and node.module in self.trees:
                full = {f"{node.module}.{each.name}" for each in node.names}
                yield from full & self.trees.keys()
                if not full <= self.trees.keys():
                    yield str(node.module)

    def folders(self) -> Counter[str]:
        """Number of modules by folder."""
        return Counter(folder_of(name) for name in self.trees if not self._is_folder(name))

    def fragments(self) -> list[str]:
        """Modules that one module of the same folder imports, and nobody else; programs aside."""
        importers = defaultdict(list)
        for name, found in self.imports.items():
            for each in found:
                importers[each].append(name)
        programs = self._run_as_programs()
        only = {name: by[0] for name, by in importers.items() if len(by) == 1 and not self._is_folder(name)}
        beside = {name: by for name, by in only.items() if folder_of(by) == folder_of(name)}
        return [
            name
            for name, by in beside.items()
            if by.rpartition(".")[2] not in PROGRAMS and name not in programs
        ]

    def rooms(self, folder: str) -> set[str]:
        """Modules and folders that stand in a folder."""
        return {name for name in self.trees if folder_of(name) == folder}

    def arrows(self, folder: str) -> set[tuple[str, str]]:
        """Pairs of rooms of a folder of which the first imports from the second."""
        depth = folder.count(".") + 2
        inside = {
            (".".join(name.split(".")[:depth]), ".".join(each.split(".")[:depth]))
            for name, found in self.imports.items()
            for each in found
            if name.startswith(f"{folder}.") and each.startswith(f"{folder}.")
        }
        return {(source, target) for source, target in inside if source != target}

    def floors(self, folder: str) -> int:
        """Number of floors of a folder's rooms.

        Raises:
            graphlib.CycleError: there is a circle; its second argument names the rooms.
        """
        graph: dict[str, set[str]] = {name: set() for name in self.rooms(folder)}
        for source, target in self.arrows(folder):
            graph[source].add(target)
        sorter = TopologicalSorter(graph)
        sorter.prepare()
        floors = 0
        while sorter.is_active():
            sorter.done(*sorter.get_ready())
            floors += 1
        return floors

    def all_folders(self) -> list[str]:
        """The package and every folder in it."""
        return sorted(name for name in self.trees if self._is_folder(name))

    def shared_names(self) -> dict[str, list[str]]:
        """Public functions and classes that several modules define."""
        places = defaultdict(list)
        for module, tree in self.trees.items():
            for node in tree.body:
                if isinstance(node, Definition) and not node.name.startswith("_"):
                    places[node.name].append(module)
        return {name: found for name, found in sorted(places.items()) if len(found) > 1}

    def short_names(self) -> set[str]:
        """Public functions of a module whose names are one word, which a search finds everywhere."""
        return {
            f"{module}.{node.name}"
            for module, tree in self.trees.items()
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.isalnum()
        }

    def large_classes(self) -> dict[str, int]:
        """Classes with more than ten fields, that are no records or sections of the config."""
        found = {}
        for module, tree in self.trees.items():
            if module.startswith((f"{self.package}.records", f"{self.package}.config")):
                continue
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and (count := len(fields_of(node))) > MOST_FIELDS:
                    found[f"{module}.{node.name}"] = count
        return found

    def lines(self) -> Counter[str]:
        """Lines by package."""
        counts: Counter[str] = Counter()
        for path in (self.root / self.package).rglob("*.py"):
            parts = path.relative_to(self.root / self.package).parts
            counts[parts[0] if len(parts) > 1 else "."] += len(path.read_text().splitlines())
        return counts

    def _is_folder(self, name: str) -> bool:
        return (self.root / name.replace(".", "/")).is_dir()

    def _run_as_programs(self) -> set[str]:
        """Modules whose name is written as a text: they run in processes of their own."""
        texts = (
            node.value
            for tree in self.trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and f"{self.package}." in node.value
        )
        return {word for text in texts if "\n" not in text for word in text.split() if word in self.trees}


def folder_of(name: str) -> str:
    """The folder of a module, or of a folder."""
    return name.rpartition(".")[0]


def fields_of(node: ast.ClassDef) -> set[str]:
    """Annotated names of a class, and attributes of `self` that its methods set."""
    names = {each.target.id for each in node.body if _is_field(each) and isinstance(each, ast.AnnAssign)}
    for each in ast.walk(node):
        is_own = isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if is_own and isinstance(each.value, ast.Name) and each.value.id == "self":
            names.add(each.attr)
    return names


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)


def main() -> int:
    """Prints all figures."""
    house = House()
    shared = house.shared_names()
    print(f"modules: {len(house.trees)}; lines: {sum(house.lines().values())}")
    print("largest folders:", ", ".join(f"{name} {num}" for name, num in house.folders().most_common(6)))
    print(f"fragments: {len(house.fragments())}")
    print(f"public names in more than one module: {len(shared)}: {', '.join(shared)}")
    print(f"public functions with a name of one word: {len(house.short_names())}")
    print(f"statements laid out by hand: {house.laid_out_by_hand()}")
    for name in house.all_folders():
        if name.count(".") < 2:
            rooms, floors, arrows = len(house.rooms(name)), house.floors(name), len(house.arrows(name))
            print(f"rooms, floors, arrows: {rooms}, {floors}, {arrows} {name}")
    for name, count in sorted(house.large_classes().items(), key=lambda found: -found[1]):
        print(f"fields: {count} {name}")
    for name, count in house.lines().most_common():
        print(f"lines: {count} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
