"""The command lines that an installed package brings."""

from importlib import metadata

import pytest

NAMES = (
    "ciera-evaluate-placement",
    "ciera-fit-placement",
    "ciera-loss-compare",
    "ciera-measure-links",
    "ciera-measure-stability",
    "ciera-report-run",
    "ciera-simulate",
)


def installed():
    try:
        points = metadata.distribution("megatron-ciera").entry_points
    except metadata.PackageNotFoundError:
        pytest.skip("megatron-ciera is not installed; make venv does that")
    return {point.name: point for point in points if point.group == "console_scripts"}


def test_all_are_there():
    assert tuple(sorted(installed())) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_help_is_printed(name, capsys):
    main = installed()[name].load()
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out
