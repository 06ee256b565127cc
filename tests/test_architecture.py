"""Checks of the repository: imports between packages, sizes of files, names."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from heddle.packages import OUR_PACKAGES

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = tuple(sorted(path.parent.name for path in ROOT.glob("heddle*/__init__.py")))
CHECKED = (*PACKAGES, "campaigns", "tools")
SOURCES = sorted(p for package in CHECKED for p in (ROOT / package).rglob("*.py"))

FILE_LINES, FUNCTION_LINES = 400, 70

LONG_FILES = {
    "heddle_core/controller.py": "one state machine: every event and the commands that follow",
    "heddle_core/loop/controller.py": "the same of a loop, above rollouts",
    "heddle_core/parts/migration.py": "all parts of a kind",
    "heddle_core/parts/planner.py": "all parts of a kind",
    "heddle_core/parts/predictor.py": "all parts of a kind",
    "heddle_runtime/process/loop.py": "one loop: orders, iterations, reports of an engine",
    "heddle_runtime/vllm/engine.py": "one implementation of EngineClient: orders, reports, its end",
    "heddle_runtime/vllm_http/engine.py": "the same behind a URL: orders, streams, its end",
    "heddle_rollout/driver.py": "one driver: events in, commands out, and how a run ends",
    "heddle_sim/batching.py": "all decisions at the boundary of an iteration, on one set of blocks",
    "heddle_sim/engine.py": "one engine: a driver's calls, its counters, and its only event",
}
"""Files above `FILE_LINES` that are one concept, with the reason why a split would not help."""

AVOID = {
    "worker": "engine",
    "workers": "engines",
    "replica": "engine",
    "replicas": "engines",
    "server": "engine",
    "servers": "engines",
    "episode": "trajectory",
    "episodes": "trajectories",
    "turn": "step",
    "turns": "steps",
    "mp": "tp",
}
"""Neighbouring fields' words, each a second name for a thing; docs/concepts.md has the rest."""

WORKER_PROCESSES = ("heddle",)
"""Packages in which a worker is a process of the executor, as in Python's own libraries."""

PROTOCOLS = {
    "heddle_verl/router.py": {
        "acquire_server",
        "release_server",
        "add_servers",
        "remove_servers",
        "get_all_servers",
        "servers",
        "server_ids",
        "server_id",
    },
    "heddle_verl/proxy.py": {"acquire_server"},
    "heddle_verl/agent_loops.py": {"agent_loop_workers_class"},
    "heddle_verl/agent_loops_tq.py": {"agent_loop_workers_class"},
}
"""Names that a protocol of others has, by the file that implements it."""

METAPHORS = frozenset(
    re.findall(
        r"\w+",
        """
    ask asked asks belief beliefs believe believed believes crowd desk desks doing errand errands
    everybody fence fenced fences ghost ghosts guest guests hear heard hears heeded house lender
    lenders lent lesson lessons nap napped napping naps nobody obey obeyed obeys room rooms seat
    seats somebody taught tell tells told untold warden wardens whoever
    """,
    )
)
"""Words for persons and rooms, in inflected forms; no identifier uses them."""

OLD_NAMES = frozenset(
    re.findall(
        r"\w+",
        """
    Fence Fitting Found Guard Headroom LifeTrial NapTrial BesideTrial Setting StepVerdict Way
    _hear _obey _rest _soon agents_at_work ask_to_leave given_up giving_up leaving put_off
    threads_matter tool_cut told_to
    """,
    )
)
"""Whole names with a standard name now; their words have other, correct uses."""

FILE_FORMATS = {
    "heddle_calibrate/sweeps.py": {"naps"},
    "heddle_calibrate/measure/session.py": {"naps"},
    "heddle_sim/profile_parts.py": {"belief"},
    "heddle_sim/profile_files.py": {"belief_transfer"},
}
"""Fields that are keys of a published file format: sweeps and profiles."""

MAKES_MUTABLE = {
    "list",
    "dict",
    "set",
    "bytearray",
    "defaultdict",
    "deque",
    "Counter",
    "OrderedDict",
}
READ_ONLY = ("Mapping[", "Sequence[", "Final[Mapping[", "Final[Sequence[")


pytestmark = pytest.mark.xdist_group("test_architecture")  # which reads every source once


@cache
def modules() -> dict[str, ast.Module]:
    """Each source by its place in the repository."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for path in SOURCES
    }


def test_errors_of_every_package_of_the_distribution_are_ours():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert sorted(wheel["targets"]["wheel"]["packages"]) == list(OUR_PACKAGES) == list(PACKAGES)


def test_no_example_of_a_property_has_a_time_limit():
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check
    own = [p.name for p in ROOT.glob("tests/**/*.py") if re.search(r"\bdeadline=\d", p.read_text())]
    assert not own


def test_imports_go_one_way_and_the_core_has_no_world():
    # The command rather than its API: it changes sys.path, which other tests should not see.
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_no_file_is_too_long():
    """A longer one is split by concept."""
    lines = {place: (ROOT / place).read_text(encoding="utf-8").count("\n") for place in modules()}
    found = {place: count for place, count in lines.items() if count > FILE_LINES}
    assert {place: found[place] for place in found if place not in LONG_FILES} == {}


def test_no_function_is_too_long():
    found = {}
    for place, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                if length > FUNCTION_LINES:
                    found[f"{place}: {node.name}"] = length
    assert found == {}


def test_packages_never_print():
    found = []
    for place, module in modules().items():
        calls = [n.func for n in ast.walk(module) if isinstance(n, ast.Call)]
        if "print" in {f.id for f in calls if isinstance(f, ast.Name)}:
            found.append(place)
    assert found == []


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        made = value.func
        name = made.id if isinstance(made, ast.Name) else getattr(made, "attr", "")
        return name in MAKES_MUTABLE
    return isinstance(
        value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    )


def shared_state(module: ast.Module) -> Iterator[str]:
    """Names in a module or class body with a mutable value that all callers share."""
    bodies = [module.body, *(n.body for n in ast.walk(module) if isinstance(n, ast.ClassDef))]
    for statement in (s for body in bodies for s in body):
        match statement:
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                continue
            case ast.Assign(value=value) if is_mutable(value):
                yield ast.unparse(statement)
            case ast.AnnAssign(value=value) if is_mutable(value):
                if not ast.unparse(statement.annotation).startswith(READ_ONLY):
                    yield ast.unparse(statement)
    yield from (ast.unparse(n) for n in ast.walk(module) if isinstance(n, ast.Global))


def test_the_core_keeps_no_state_outside_objects():
    core = {
        place: module for place, module in modules().items() if place.startswith("heddle_core/")
    }
    assert core
    assert {place: found for place, m in core.items() if (found := [*shared_state(m)])} == {}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("SEEN = {}", True),
        ("SEEN: dict[str, int] = {}", True),
        ("class A:\n    seen = []", True),
        ("from collections import deque\nLATEST = deque()", True),
        ("def f():\n    global x\n    x = 1", True),
        ("PRESETS: Mapping[str, int] = {'a': 1}", False),
        ("__all__ = ['f']", False),
        ("LIMIT = 3", False),
        ("def f():\n    seen = []\n    return seen", False),
    ],
)
def test_the_check_for_shared_state_sees_what_it_should(code, found):
    assert bool(list(shared_state(ast.parse(code)))) is found


def defined_names(module: ast.Module) -> Iterator[str]:
    """Names that the code defines, without those of libraries."""
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def words(name: str) -> list[str]:
    return [w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def test_every_thing_has_one_name():
    """What to say instead is in docs/concepts.md."""
    found = []
    for place, module in modules().items():
        package = place.partition("/")[0]
        others = PROTOCOLS.get(place, ())
        for name in defined_names(module):
            for word in words(name) if name not in others else ():
                if package in WORKER_PROCESSES and word.startswith("worker"):
                    continue
                if word in AVOID:
                    found.append(f"{place}: {name}: say {AVOID[word]!r}")
    assert found == []


def metaphors(names: Iterable[str]) -> list[str]:
    return [n for n in names if n in OLD_NAMES or not METAPHORS.isdisjoint(words(n))]


def test_identifiers_and_modules_are_terms_of_the_field():
    found = []
    for place, module in modules().items():
        names = [*Path(place).with_suffix("").parts, *defined_names(module)]
        others = FILE_FORMATS.get(place, ())
        found += [f"{place}: {name}" for name in metaphors(names) if name not in others]
    assert found == []


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("believed_makespan_s", True),
        ("Told", True),
        ("_errands", True),
        ("Setting", True),
        ("vllm_settings", False),
        ("_call_soon", False),
        ("synapse", False),
    ],
)
def test_the_check_for_metaphors_sees_what_it_should(name, refused):
    assert bool(metaphors([name])) is refused


def test_no_two_classes_of_different_packages_share_a_name():
    """A search for a class finds one definition; re-exports are imports."""
    packages: dict[str, set[str]] = defaultdict(set)
    for place, module in modules().items():
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                packages[node.name].add(place.partition("/")[0])
    assert {name: sorted(of) for name, of in packages.items() if len(of) > 1} == {}


def test_identifiers_are_cut_into_words():
    assert words("KvTransferPolicy_perTP2") == ["kv", "transfer", "policy", "per", "tp"]
    assert words("ToolReturned") == ["tool", "returned"]


# Written in halves, or this file would be the first to break its own rule.
FOLDERS = ["/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/"]
HOSTS = ["py" + "pi.org", "python" + "hosted.org", "npm" + "js.org", "deb" + "ian.org"]
PLACES = re.compile(
    r"(?<![\w.])(" + "|".join(FOLDERS) + ")|" + "|".join(re.escape(host) for host in HOSTS)
)


def tracked_files() -> list[Path]:
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_machine_or_a_registry():
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # binary: figures, compressed traces
        found += [f"{path.relative_to(ROOT)}: {m.group()}" for m in PLACES.finditer(text)]
    assert found == []


@pytest.mark.parametrize("bad", [f"cd {FOLDERS[0]}x", f"https://files.{HOSTS[1]}/a", HOSTS[0]])
def test_the_check_for_places_sees_what_it_should(bad):
    assert PLACES.search(bad)
    assert not PLACES.search("../shared/traces and net" + FOLDERS[0])


def test_the_invariants_name_tests_that_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert re.findall(r"^### (\d+)\.", text, flags=re.MULTILINE) == [str(i) for i in range(1, 12)]
    for part in re.split(r"^##+ ", text.partition("\n### ")[2], flags=re.MULTILINE)[:11]:
        checked = part.partition("*Checked by*")[2]
        assert "*Why.*" in part
        assert "Ledger." in checked or "tests/" in checked, part.partition("\n")[0]
    for name in re.findall(r"tests/[\w/]+\.py", text):
        assert (ROOT / name).is_file(), name
