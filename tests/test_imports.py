"""Which module may import which, and that `import netjac` stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import netjac

PACKAGE = Path(netjac.__file__).parent
HEAVY = ("tensorflow", "keras", "dask", "distributed", "zarr", "matplotlib", "typer", "tqdm", "sklearn")

FOUNDATION = {"errors", "spaces", "sites"}
JACOBIAN = {
    "layout",
    "planning",
    "memory",
    "allocation",
    "materialise",
    "arguments",
    "algebra",
    "normal",
    "kronecker",
    "plans",
    "transposed",
    "progress",
    "tilewise",
    "operator",
    "jacobian",
}

# What each part may import of the package; its own folder always. Parts not listed may import all but a framework.
ARROWS = {
    "errors": set(),
    "spaces": {"errors"},
    "sites": {"errors", "spaces"},
    "blocks": FOUNDATION,
    "factor": FOUNDATION | {"blocks"},
    "layout": {"errors"},
    "planning": {"errors"},
    "memory": set(),
    "allocation": {"planning"},
    "progress": {"errors"},
    "prefetch": set(),
    "data": {"errors"},
    "materialise": {"errors", "planning", "blocks", "pools"},
    "arguments": {"errors", "materialise"},
    "algebra": {"errors", "planning", "allocation", "blocks", "materialise", "pools", "progress"},
    "normal": {"planning", "allocation", "algebra", "materialise"},
    "kronecker": {"blocks", "algebra"},
    "plans": {"planning", "algebra", "normal"},
    "transposed": {"errors", "arguments"},
    "tilewise": FOUNDATION | JACOBIAN - {"jacobian", "operator"},
    "operator": FOUNDATION | JACOBIAN - {"jacobian"},
    "jacobian": FOUNDATION | JACOBIAN | {"blocks"},
    "pools": set(),
    "optimize": FOUNDATION | JACOBIAN | {"blocks", "pools", "data", "api", "tensorflow"},
}
# Only these may import a framework; all but the folder itself inside a function (see the test that netjac is light).
FRAMEWORK = {"tensorflow", "api", "optimize"}
# These use the library as anybody may.
USERS = {"cli", "demo"}


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def part(path: Path) -> str:
    """First name below the package: ``blocks`` for blocks/outer.py, ``jacobian`` for jacobian.py."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(tree: ast.AST, module: str) -> set[str]:
    """Full names of all modules a file imports, anywhere in it, except for types alone."""
    names: set[str] = set()
    skipped = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def inside(names: set[str]) -> set[str]:
    """The parts of netjac among imported names."""
    return {name.split(".")[1] for name in names if name.startswith("netjac.")}


def violations(path: Path, source: str) -> set[str]:
    """What the file imports and may not."""
    own = part(path)
    names = imported(ast.parse(source), str(path))
    wrong: set[str] = set()
    if own in ARROWS:
        wrong |= inside(names) - ARROWS[own] - {own}
    if own in USERS:
        return wrong
    if own not in FRAMEWORK:
        wrong |= {name for name in names if name.split(".")[0] in ("tensorflow", "keras")}
        wrong |= inside(names) & {"tensorflow"}
    if own != "plots":
        wrong |= {name for name in names if name.split(".")[0] == "matplotlib"}
    if own != "distributed":
        wrong |= {name for name in names if name.split(".")[0] in ("dask", "distributed", "cloudpickle")}
    return wrong


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_the_arrows(path):
    assert violations(path, path.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    ("name", "source", "found"),
    [
        ("blocks/outer.py", "from netjac.jacobian import Jacobian", {"jacobian"}),
        ("blocks/outer.py", "from netjac import materialise", {"materialise"}),
        ("sites.py", "def f():\n    import netjac.blocks.base", {"blocks"}),
        ("jacobian.py", "import netjac.tensorflow.trace", {"tensorflow"}),
        ("factor.py", "import tensorflow as tf", {"tensorflow"}),
        ("algebra.py", "from matplotlib import pyplot", {"matplotlib.pyplot"}),
        ("store.py", "import dask.array", {"dask.array"}),
        ("store.py", "from distributed import Client", {"distributed.Client"}),
    ],
)
def test_a_forbidden_import_is_found(name, source, found):
    assert violations(PACKAGE / name, source) == found


def test_importing_netjac_is_light():
    code = f"import sys, netjac; print([name for name in {HEAVY} if name in sys.modules])"
    assert run(code) == "[]"


@pytest.mark.parametrize(
    "name", ["jacobian", "materialise", "algebra", "layout", "optimize.problem", "api", "streaming"]
)
def test_every_part_imports_by_itself(name):
    code = f"import sys, netjac.{name}; print([name for name in {HEAVY} if name in sys.modules])"
    assert run(code) == "[]"


def test_public_names_exist_and_are_documented():
    for name in netjac.__all__:
        value = getattr(netjac, name)
        assert isinstance(value, str) or value.__doc__


@pytest.mark.parametrize("first", ["netjac", "netjac.jacobian", "netjac.api", "netjac.tensorflow.trace"])
def test_the_function_is_not_hidden_by_the_module_of_the_same_name(first):
    if "tensorflow" in first:
        pytest.importorskip("tensorflow")
    code = f"import {first}, netjac, netjac.jacobian; print(callable(netjac.jacobian))"
    assert run(code).splitlines()[-1] == "True"


def test_errors_are_netjacs_and_the_standard_ones():
    standard = {
        "ShapeError": ValueError,
        "DtypeError": TypeError,
        "LayoutError": ValueError,
        "NameLookupError": KeyError,
        "DataError": ValueError,
        "ModelError": ValueError,
    }
    for name, base in standard.items():
        assert issubclass(getattr(netjac, name), base)
        assert issubclass(getattr(netjac, name), netjac.NetjacError)


@pytest.mark.parametrize(
    "call", ["nj.jacobian(None, [[1.0]])", "nj.input_jacobian(None, [[1.0]])", "nj.parameters(None)"]
)
def test_without_tensorflow_the_message_says_what_to_install(call):
    code = f"""
import sys
from importlib.abc import MetaPathFinder

class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tensorflow", "keras"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
import netjac as nj
try:
    {call}
except ImportError as error:
    print(error)
"""
    assert 'pip install "netjac[tensorflow-cpu]"' in run(code)


def test_without_dask_the_message_says_what_to_install():
    code = """
import sys
from importlib.abc import MetaPathFinder

class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("dask", "distributed"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
import netjac as nj
try:
    nj.distributed
except ImportError as error:
    print(error)
"""
    assert 'pip install "netjac[dask]"' in run(code)
