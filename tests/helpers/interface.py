"""The public interface as a listing, read from the sources by griffe; nothing is imported. `make interface` records it.

    python tests/helpers/interface.py

A line for each name that a caller can use: its place, kind, and parameters with their defaults. docs/support/interface.txt
holds what the last release had; tests/package/test_interface.py wants each change in CHANGELOG.md.
"""

import ast
import pathlib
import re

import griffe

ROOT = pathlib.Path(__file__).parents[2]
LISTING = ROOT / "docs" / "support" / "interface.txt"
CHANGES = ROOT / "CHANGELOG.md"
# Commands: docs/command_line.md is their interface, and `mx_driving` imports none.
PROGRAMS = ("cli",)
DUNDERS = ("__init__", "__call__")


def is_public(name: str) -> bool:
    return not name.startswith("_") or name in DUNDERS


def signature(function: griffe.Function) -> str:
    words, starred = [], False
    for parameter in function.parameters:
        if parameter.kind is griffe.ParameterKind.keyword_only and not starred:
            words.append("*")
        starred = starred or parameter.kind in (griffe.ParameterKind.keyword_only, griffe.ParameterKind.var_positional)
        stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(parameter.kind, "")
        default = f"={parameter.default}" if parameter.default is not None and not stars else ""
        words.append(f"{stars}{parameter.name}{default}")
    return f"({', '.join(words)})"


def described(member: griffe.Object | griffe.Alias) -> str:
    if member.is_function:
        return f"{member.path}{signature(member)}"  # pyright: ignore
    if member.is_class:
        bases = ", ".join(str(base).rsplit(".", 1)[-1] for base in member.bases)  # pyright: ignore
        return f"{member.path}: class({bases})"
    return f"{member.path}: {member.kind.value}"


def members_of(module: griffe.Module) -> list[griffe.Object | griffe.Alias]:
    """Return the members that `__all__` names; without `__all__`, the members that the file defines."""
    names = module.exports or [name for name, member in module.members.items() if is_public(name) and not member.is_alias]
    return [module.members[str(name)] for name in names if str(name) in module.members]


def lines_of(module: griffe.Module, prefix: str, names: str = "") -> list[str]:
    lines = [f"{prefix}: module"]
    for member in [module.members[name] for name in names.split()] or members_of(module):
        target = member.final_target if member.is_alias else member  # pyright: ignore
        if target.is_module:
            continue
        lines.append(described(target).replace(target.path, f"{prefix}.{member.name}", 1))
        if target.is_class:
            lines += [
                described(inner).replace(inner.path, f"{prefix}.{member.name}.{name}", 1)
                for name, inner in target.members.items()
                if is_public(name) and not inner.is_alias
            ]
    if names:
        return lines
    if "_MODULES" in module.members:  # modules that a file makes: name -> names of the file
        for name, inner in ast.literal_eval(str(module.members["_MODULES"].value)).items():  # pyright: ignore
            lines += lines_of(module, f"{prefix}.{name}", inner)
    for name, inner in module.modules.items():
        if is_public(name) and name not in PROGRAMS and not inner.is_alias:
            lines += lines_of(inner, f"{prefix}.{name}")
    return lines


def listing(source: pathlib.Path = ROOT / "src") -> list[str]:
    names = ("mx_driving", "mx_driving_portable")
    loader = griffe.GriffeLoader(search_paths=[source], allow_inspection=False)
    packages = [loader.load(name) for name in names]
    loader.resolve_aliases(implicit=True)
    return sorted({line for package in packages for line in lines_of(package, package.name)})  # pyright: ignore


def newest_changes(text: str) -> str:
    """Return the first section of CHANGELOG.md, which has the unreleased changes."""
    return text.split("\n## ")[1]


def unexplained(before: list[str], now: list[str], changes: str) -> list[str]:
    """Return lines that were added, removed or changed, and whose names are not in the changes."""
    different = sorted(set(before) ^ set(now))
    return [line for line in different if not re.search(rf"\b{re.escape(name_of(line))}\b", changes)]


def name_of(line: str) -> str:
    path = re.split(r"[(:]", line, maxsplit=1)[0]
    *_, owner, name = path.split(".") if "." in path else ("", path)
    return owner if name in DUNDERS else name


def main() -> None:
    LISTING.write_text("\n".join(listing()) + "\n")
    print(f"{LISTING.relative_to(ROOT)}: {len(listing())} names")


if __name__ == "__main__":
    main()
