"""The shape of the project: imports run one way, everything needed is tracked and packed, documents say what is so."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hybridtrt
from hybridtrt.cli import make_parser

ROOT = Path(__file__).resolve().parent.parent
ORDER = ("plugins", "converters", "build", "runtime", "model_repo")
SUPPORT = ("cli", "commands", "progress", "sampling_options")  # modules of the package's root, above everything


def imported(path: Path) -> set[str]:
    """Names of the modules of hybridtrt that a file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.startswith("hybridtrt.")}


@pytest.mark.parametrize("package", ORDER)
def test_imports_run_one_way(package: str) -> None:
    allowed = set(ORDER[: ORDER.index(package) + 1])
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        for name in imported(path):
            target = name.split(".")[1]
            assert target in allowed | {"__version__"}, f"{path.relative_to(ROOT)} imports {name}"


def test_only_scripts_commands_and_progress_stand_above() -> None:
    assert {path.stem for path in (ROOT / "src/hybridtrt").glob("*.py")} == {"__init__", *SUPPORT}


def test_packages_are_relative_links_that_git_tracks() -> None:
    """`build` and `plugins` are names that ignore files like to drop."""
    tracked = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for package in ORDER:
        link = ROOT / "src/hybridtrt" / package
        assert link.is_symlink()
        assert not link.readlink().is_absolute()
        assert re.search(rf"^120000 \S+ 0\tsrc/hybridtrt/{package}$", tracked, re.MULTILINE)
        on_disk = {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
        assert on_disk <= set(re.findall(r"\t(.+)$", tracked, re.MULTILINE))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-P", "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(ROOT)], check=True, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_every_module_and_template(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ORDER:
        for pattern in ("*.py", "*.pbtxt"):
            for path in (ROOT / package).rglob(pattern):
                assert f"hybridtrt/{path.relative_to(ROOT)}" in names
    assert not [name for name in names if name.startswith(("build/", "plugins/", "tests/"))]


def test_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Unpacked elsewhere, it is imported from there and shows its commands."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import hybridtrt.cli; print(hybridtrt.cli.__file__);"
        "hybridtrt.cli.main(['--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(tmp_path / "site")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
    assert "serve" in done.stdout


def test_readme_names_only_commands_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = make_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    used = set(re.findall(r"hybridtrt (\w+)", "\n".join(re.findall(r"```\w*\n(.*?)```", readme, re.DOTALL))))
    assert used == set(commands)
    for script in re.findall(r"\./(scripts/[\w.]+)", readme):
        assert (ROOT / script).stat().st_mode & 0o100
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", readme):
        assert (ROOT / link).exists()


def test_ci_runs_the_test_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "./scripts/test.sh" in readme
    assert "./scripts/test.sh" in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_version_is_one() -> None:
    done = subprocess.run([sys.executable, "-P", "-m", "hybridtrt.cli", "--version"], capture_output=True, text=True)
    assert done.stdout.split() == ["hybridtrt", hybridtrt.__version__]
