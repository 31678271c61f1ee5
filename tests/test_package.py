"""What strangers install: the files in wheel and source distribution, and the commands that either brings."""

import email
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.launching import ROOT, TINY, launch
from tests.test_entry_points import NAMES as COMMANDS

VERSION = "0.1.0"
EXTRAS = ["dev", "nvcomp", "partitioners", "plots", "safetensors", "tensorboard", "test"]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def tracked() -> list[str]:
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a git clone: the expected files are the tracked ones")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with both distributions, built from a copy of the tracked files."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    for kind in ("build_sdist", "build_wheel"):
        run([sys.executable, "-c", BUILD, kind, folder], source)
    return folder


def run(command, folder, **environment) -> str:
    """Standard output of a command that must succeed, away from the clone and without its path."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**variables, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def wheel_of(folder: Path) -> Path:
    return folder / f"megatron_ciera-{VERSION}-py3-none-any.whl"


def sdist_of(folder: Path) -> Path:
    return folder / f"megatron_ciera-{VERSION}.tar.gz"


def test_wheel_has_both_packages_and_nothing_else(built):
    packages = [
        name for name in tracked() if name.split("/")[0] in ("megatron_ciera", "placement") and "/" in name
    ]
    information = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
    expected = {*packages, *(f"megatron_ciera-{VERSION}.dist-info/{name}" for name in information)}
    with zipfile.ZipFile(wheel_of(built)) as wheel:
        assert {name for name in wheel.namelist() if not name.endswith("/")} == expected
        # Of what is not Python only the markers of typed packages are read by anything installed.
        assert [name for name in packages if not name.endswith((".py", "/py.typed"))] == []
        assert wheel.read("megatron_ciera/py.typed") == wheel.read("placement/py.typed") == b""


def test_source_distribution_is_the_clone(built):
    root = f"megatron_ciera-{VERSION}/"
    with tarfile.open(sdist_of(built)) as archive:
        found = {member.name.removeprefix(root) for member in archive.getmembers() if member.isfile()}
    made = {name for name in found if name.startswith("megatron_ciera.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert found - made == set(tracked())


def test_metadata(built):
    with zipfile.ZipFile(wheel_of(built)) as wheel:
        metadata = email.message_from_bytes(wheel.read(f"megatron_ciera-{VERSION}.dist-info/METADATA"))
    assert sorted(metadata.get_all("Provides-Extra")) == EXTRAS
    required = metadata.get_all("Requires-Dist")
    assert "torch>=2.6" in required and "megatron-core<0.20,>=0.19" in required
    assert metadata["Requires-Python"] == ">=3.12" and metadata["License"] == "Apache-2.0"


@pytest.mark.slow
@pytest.mark.parametrize("which", [wheel_of, sdist_of], ids=["wheel", "sdist"])
def test_installed_commands_work_outside_the_clone(built, tmp_path, which):
    target, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    # Dependencies come from the environment of the tests; the build backend too, so that no index is asked.
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    run([*pip, "--target", target, which(built)], elsewhere)
    assert tuple(sorted(path.name for path in (target / "bin").iterdir())) == COMMANDS
    where = "import megatron_ciera, placement; print(megatron_ciera.__file__, placement.__file__)"
    for origin in run([sys.executable, "-c", where], elsewhere, PYTHONPATH=str(target)).split():
        assert Path(origin).is_relative_to(target)
    for command in COMMANDS:
        printed = run([target / "bin" / command, "--help"], elsewhere, PYTHONPATH=str(target))
        assert printed.startswith(f"usage: {command} ")
    assert "megatron_ciera" in run(
        [sys.executable, "-m", "megatron_ciera", "--help"], elsewhere, PYTHONPATH=str(target)
    )
    assert list(elsewhere.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.16.1", "0.18.2"])
def test_installed_megatron_of_another_version_is_refused(tmp_path, version):
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path / "site"]
    installed = subprocess.run(
        [str(word) for word in [*pip, f"megatron-core=={version}"]], capture_output=True
    )
    if installed.returncode:
        pytest.skip(f"megatron-core {version} cannot be installed here: {installed.stderr.decode()[-200:]}")
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    stopped = launch(tmp_path / "run", 2, TINY, timeout=120, PYTHONPATH=path)
    assert stopped.returncode != 0 and stopped.tracebacks == 0
    assert f"megatron-core: found version {version} in {tmp_path / 'site'}" in stopped.output
    assert "needs >=0.19,<0.20" in stopped.output and "Install megatron-core 0.19.2" in stopped.output
    assert stopped.said.count("megatron-ciera: error") == 1
