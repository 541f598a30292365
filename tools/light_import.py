"""Importing the coordinator without torch.

Whatever lies under `megatron.core` imports megatron-core's own `__init__` first, and with it torch
and the transformer: 5 to 20 s, and 400 MB. A coordinator that runs alone needs none of that, only
two enums of `megatron.core.inference.config`. For such a process, and before anything of
megatron-core is imported, `import_lightly` puts empty packages in the place of megatron-core's and
takes these enums out of their module's source.
"""

import ast
import enum
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

_PACKAGES = ("megatron.core", "megatron.core.inference")
_CONFIG = "megatron.core.inference.config"


def import_lightly() -> bool:
    """Let `megatron.core.inference.coordinator` be imported without megatron-core.

    Returns:
        Whether it was done; if not, e.g. because megatron-core was imported before, everything is
        as it was, and imports are slow.
    """
    if "megatron.core" in sys.modules:
        return False
    megatron = importlib.util.find_spec("megatron")
    paths = list(megatron.submodule_search_locations or ()) if megatron is not None else []
    modules = {}
    for name in _PACKAGES:
        spec = PathFinder.find_spec(name, paths)
        if spec is None or spec.submodule_search_locations is None:
            return False
        modules[name] = module = ModuleType(name)
        module.__path__ = paths = list(spec.submodule_search_locations)
    config = _enums_of(PathFinder.find_spec(_CONFIG, paths))
    if config is None:
        return False
    sys.modules.update(modules | {_CONFIG: config})
    return True


def _enums_of(spec: importlib.machinery.ModuleSpec | None) -> ModuleType | None:
    """A module that holds nothing but the enums of another."""
    if spec is None or spec.origin is None:
        return None
    tree = ast.parse(Path(spec.origin).read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and _is_enum(node)]
    module = ModuleType(_CONFIG)
    module.__dict__.update({name: getattr(enum, name) for name in enum.__all__})
    exec(compile(tree, spec.origin, "exec"), module.__dict__)
    return module


def _is_enum(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id in enum.__all__ for base in node.bases)
